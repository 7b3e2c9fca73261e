"""The page that says which test holds which promise leaves none out; `tests/test_promises.py` looks for the tests."""

from __future__ import annotations

import re

from .matrix import cells, cover, wide_cells
from .toy import REPOSITORY

PAGE = (REPOSITORY / "docs" / "internals" / "training-coverage.md").read_text()


def test_no_mistake_and_no_weakness_is_left_out() -> None:
    rows = re.findall(r"^\| ([w\d, ]+) \|", PAGE, re.MULTILINE)
    found = [name for row in rows for name in row.split(", ")]
    assert sorted(found) == sorted([*map(str, range(1, 49)), *(f"w{number}" for number in range(1, 34))])


def test_the_page_counts_the_cells() -> None:
    assert f"Each of the {len(cells())} cells" in PAGE
    assert f"{len(cover(wide_cells()))} cells that hold every pair" in PAGE
