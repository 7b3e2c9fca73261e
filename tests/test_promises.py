"""What names tests names those that there are, and the pages of promises leave none out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / "docs" / name).read_text()
    for name in (
        "internals/curation-coverage.md",
        "internals/stack-faults.md",
        "internals/training-coverage.md",
        "internals/training-features.md",
        "reference/security.md",
    )
}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"`(\w+)::(\w+)`", PAGES[page]))
    assert len(named) > 5
    for file, test in sorted(named):
        paths = list((ROOT / "tests").rglob(f"{file}.py"))
        assert any(has(path, test) for path in paths), f"{file}::{test}"


def has(path: Path, test: str) -> bool:
    return re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE) is not None


def test_every_test_that_is_named_as_slow_is_there() -> None:
    for line in (ROOT / "tests/slow.txt").read_text().splitlines():
        path, _, test = line.split()[1].partition("::")
        assert (ROOT / path).exists(), line
        assert not test or has(ROOT / path, test), line


def test_no_mistake_and_no_feature_of_curation_is_left_out() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| .*? \| (.*) \|$", PAGES["internals/curation-coverage.md"], re.MULTILINE))
    assert {*map(str, range(1, 46)), "A2", "A10", "B5", "B6", "B7", "B8", "B9"} <= set(rows)
    assert all("::" in rows[str(number)] for number in range(1, 46))


def test_no_row_of_where_it_runs_is_left_out() -> None:
    """Each is done, or says what is not and why."""
    page = (ROOT / "docs/internals/platform-coverage.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z]\d+) \| .*? \| (.*) \|$", page, re.MULTILINE))
    asked = {"C": (5, 11), "H": (1, 8), "I": (1, 6), "J": (1, 5), "K": (1, 3), "L": (1, 5), "M": (1, 4)}
    assert {f"{letter}{n}" for letter, (first, last) in asked.items() for n in range(first, last + 1)} <= set(rows)
    assert {"E10", "N2"} <= set(rows)
    assert all(rows.values())
