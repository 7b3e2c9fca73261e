"""How values are written."""

from __future__ import annotations

import math

import pytest

from dropforge.cli.comparing.texts import difference, excerpts, figure, visible
from dropforge.comparison import Change


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        (0.0, "0"),
        (12345.0, "12,345"),
        (-2.0, "−2"),
        (-0.12345, "−0.1235"),
        (2.5, "2.5000"),
        (0.0005, "0.0005"),
        (3e-07, "3e-07"),
        (12345.678, "12,345.7"),
        (1.5e300, "1.5e+300"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
    ],
)
def test_figures(value: float | None, told: str) -> None:
    assert figure(value) == told


def test_differences() -> None:
    assert difference(Change(-0.5, -20.0)) == "−0.5000 (−20.0%)"
    assert difference(Change(0.001, 0.02)) == "+0.001 (+0.02%)"
    assert difference(Change(3.0, None)) == "+3"
    assert difference(Change(0.0, 0.0)) == "="
    assert difference(None) == ""


def test_of_long_values_the_part_is_shown_where_they_differ() -> None:
    one, other = "a" * 3000 + "one" + "b" * 3000, "a" * 3000 + "other" + "b" * 3000
    found = excerpts([one, other, None], 40)
    assert found[2] is None
    assert [text and len(text) for text in found[:2]] == [40, 40]
    assert "aone" in str(found[0])
    assert "aother" in str(found[1])
    assert excerpts(["short", "x" * 41], 40) == ["short", "x" * 39 + "…"]
    assert excerpts(["same" * 30] * 2, 10) == ["samesames…"] * 2


def test_unseen_characters_are_shown() -> None:
    assert visible("a\x1b[31m\u202eb\ud800 c") == "a\\u001b[31m\\u202eb\\ud800 c"
