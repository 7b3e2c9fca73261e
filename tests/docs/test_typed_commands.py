"""Commands as the pages have them typed: each names a command and options that there are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dropforge.cli.app import app
from tests.docs.markdown_pages import ROOT, pages

_TYPED = re.compile(r"(?<![\w./$-])(?:\.venv/bin/)?dropforge ((?!import )[a-z][^\n`]*)")
#: Where a command ends: what its output goes to, a remark, or the rest of a table's row.
_END = re.compile(r"  +| \| ?| > | && |; | # | \.\.\.|[)\"|]")
#: What was once, and what is made from the commands themselves.
_OTHERS = ("CHANGELOG.md", "commands.md")
_READ = [page for page in pages() if page.name not in _OTHERS and _TYPED.search(page.read_text())]


@cache
def _tree() -> Any:
    return get_command(app)


def wrong(typed: str) -> str:
    """What there is none of in a command line; empty if all of it is."""
    words = _END.split(typed, maxsplit=1)[0].split()
    command: Any = _tree()
    while words and (below := getattr(command, "commands", None)) is not None and not words[0].startswith("-"):
        if words[0] not in below:
            return words[0]
        command = below[words.pop(0)]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    options = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    return next((one for one in options if re.match(r"--?[a-z]", one) and one not in known), "")


@pytest.mark.parametrize("page", _READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_typed_on_a_page_is_a_command_with_its_options(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    found = {typed: lost for typed in _TYPED.findall(text) if (lost := wrong(typed))}
    assert found == {}


def test_what_is_no_command_is_found() -> None:
    assert wrong("manifests nothing --namespace a | kubectl apply -f -") == ""
    assert wrong("manifest rights") == "manifest"
    assert wrong("queues rendered teams.yaml") == "rendered"
    assert wrong("drop a.jsonl --famliy x   # a remark") == "--famliy"
