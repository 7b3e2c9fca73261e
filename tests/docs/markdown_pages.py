"""The Markdown pages of the repository, and what their links and headings are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1?\2[`~]* *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def pages() -> list[Path]:
    """Return all pages, but those of other people below `.venv` and the like."""
    folders = [ROOT / name for name in ("docs", "plugins", "images", "helm-values", "examples", "requirements")]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the target (empty for the page itself) and the anchor of each link to a file."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    yield from _LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Git servers and the site make them, and those that it sets itself."""
    text = _FENCE.sub("", page.read_text())
    found = set(re.findall(r'<a id="([^"]+)"', text))
    seen: Counter[str] = Counter()
    for heading in _HEADING.findall(text):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def prose(page: Path) -> str:
    """Return a page without what is code: fences, lines that are indented by four, and inline code."""
    text = _FENCE.sub("", page.read_text())
    return _CODE.sub("`", re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE))
