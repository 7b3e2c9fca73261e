"""The pages that say which test holds which promise name tests that there are, and leave no promise out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("exactness.md", "trust.md")}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"`(\w+)::(\w+)`", PAGES[page]))
    assert len(named) > 60
    for file, test in sorted(named):
        paths = list((ROOT / "tests").rglob(f"{file}.py"))
        assert any(re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE) for path in paths), f"{file}::{test}"


def test_no_mistake_and_no_feature_of_curation_is_left_out() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| .*? \| (.*) \|$", PAGES["trust.md"], re.MULTILINE))
    assert {*map(str, range(1, 35)), "A2", "A10", "B5", "B6", "B7", "B8", "B9"} <= set(rows)
    assert all("::" in rows[str(number)] for number in range(1, 35))
