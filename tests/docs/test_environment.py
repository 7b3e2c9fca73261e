"""The table of environment variables has each that the code reads, and no other."""

from __future__ import annotations

import re
from typing import Final

from dropforge.stack.services import _CURATING, _WELCOME
from tests.docs.markdown_pages import ROOT

_NAME: Final = r"(?:DROPFORGE|KUBEFLOW_TRAINING)_[A-Z0-9_]+"
_PARTS: Final = ("dropforge", "curation", "trainer", "plugins", "dags")
PAGE = (ROOT / "docs/reference/environment.md").read_text()


def test_every_variable_that_is_read_has_a_line() -> None:
    files = [path for part in _PARTS for path in (ROOT / part).rglob("*.py")]
    read = {name for path in files for name in re.findall(rf"[\"'`]({_NAME})[\"'`]", path.read_text())}
    assert set(re.findall(rf"`({_NAME})", PAGE)) == read


def test_what_the_embedded_stack_takes_over_is_marked() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    marked = {name for row in rows if "†" in row for name in re.findall(rf"`({_NAME})`", row)}
    assert marked == {*_WELCOME, *_CURATING}
