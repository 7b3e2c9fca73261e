"""Add the repository's files to which pages lead, as `images/README.md`, to the site below `repository/`.

MkDocs calls these hooks (`mkdocs.yml`). The links in the pages stay what they are where the files are read: relative to
the file that they stand in.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]+)")
_FOLDER: Final = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages lead to outside of the documentation, and what these lead to in turn."""
    docs = Path(config.docs_dir)
    waiting = [docs / file.src_uri for file in files.documentation_pages()]
    known: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in {(page.parent / link).resolve() for link in _LINK.findall(page.read_text())}:
            if target in known or target.is_relative_to(docs) or not target.is_file():
                continue
            known.add(target)
            address, hidden = _address(target, docs), InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, address, abs_src_path=str(target), inclusion=hidden))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to where the files are on the site."""
    docs = Path(config.docs_dir)
    source = Path(str(page.file.abs_src_path))
    here = Path(page.file.src_uri).parent
    if source.name == "CHANGELOG.md":  # it has all words, and says what was
        page.meta["search"] = {"exclude": True}

    def moved(found: re.Match[str]) -> str:
        target = (source.parent / found[1]).resolve()
        address = _address(target, docs)
        return relpath(address, here) if files.get_file_from_path(address) else found[1]

    return _LINK.sub(moved, markdown)


def _address(target: Path, docs: Path) -> str:
    if target.is_relative_to(docs):
        return target.relative_to(docs).as_posix()
    return f"{_FOLDER}/{relpath(target, docs.parent)}"
