"""The pages of data formats: every row that they show becomes what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from curation.canonical import LISTS, PAIRS, ROLES, Row, canonical
from curation.turns import KNOWN, TOOLS

PAGES = ("data-formats.md", "conversation-formats.md", "labels-and-groups.md", "shard-columns.md")
TEXT = "".join((Path(__file__).parents[2] / "docs" / "reference" / page).read_text() for page in PAGES)
SHOWN = [json.loads(block) for block in re.findall(r"```json\n(.*?)\n```", TEXT, re.DOTALL)]


def told(row: Row) -> dict[str, Any]:
    beside = [json.loads(text or "{}") for text in row.beside] or [{}] * len(row.roles)
    turns = zip(row.roles, row.contents, beside, strict=True)
    found = {
        "messages": [{"role": role, "content": content, **more} for role, content, more in turns] or None,
        "tools": json.loads(row.tools) if row.tools else None,
        **{name: getattr(row, name) for name in ("text", "label", "source", "group")},
    }
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(("given", "becomes"), list(zip(SHOWN[::2], SHOWN[1::2], strict=True)))
def test_a_row_becomes_what_the_pages_say(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert told(canonical(given)) == becomes


def test_the_pages_name_every_key_and_role_that_is_read() -> None:
    names = {*LISTS, *(name for pair in PAIRS for name in pair), *ROLES, *KNOWN, *TOOLS}
    assert len(SHOWN) >= 24
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", TEXT)) == []
