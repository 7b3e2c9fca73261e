"""Curves as blocks and as SVG."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from dropforge.cli.comparing.plot import plot, ticks
from dropforge.cli.comparing.terminal import sparkline
from dropforge.comparison import Curve

SVG = "{http://www.w3.org/2000/svg}"


def test_blocks_are_on_the_scale_that_all_runs_share() -> None:
    points = ((0, 0.0), (10, 7.0))
    assert sparkline(points, (0, 10), (0.0, 7.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(points, (0, 10), (0.0, 14.0), 3) == "▁▃▅"
    assert sparkline(points, (0, 20), (0.0, 7.0), 5) == "▁▅█  "  # it ended earlier than others
    assert sparkline(((5, 3.0),), (0, 10), (3.0, 3.0), 3) == " ▅ "
    assert sparkline((), (0, 0), (0.0, 0.0), 3) == ""


def test_a_value_that_is_not_finite_is_marked_in_its_place() -> None:
    assert sparkline(((0, 1.0), (1, math.nan), (2, 1.0)), (0, 2), (0.0, 1.0), 3) == "█×█"
    assert sparkline(((0, math.inf), (2, math.nan)), (0, 2), (0.0, 0.0), 3) == "× ×"


def test_ticks_are_round() -> None:
    assert ticks(0.03, 0.97) == [0.2, 0.4, 0.6000000000000001, 0.8]
    assert ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert ticks(5, 5) == [5]
    assert ticks(11_800, 12_100)[0] == 11_800


LARGEST, LEAST = sys.float_info.max, 5e-324


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-LARGEST, LARGEST),
        (-1e308, 1e308),
        (0.0, LEAST),
        (-LEAST, LEAST),
        (LARGEST / 2, LARGEST),
        (1e308, 1.0000001e308),
    ],
    ids=["all floats", "large", "least", "around none", "above", "near"],
)
def test_the_largest_and_least_floats_are_drawn_at_their_ends(low: float, high: float) -> None:
    assert sparkline(((0, low), (5, high)), (0, 5), (low, high), 2) == "▁█"
    assert len(sparkline(((0, low), (5, high)), (0, 5), (low, high), 20).strip()) == 20
    assert sparkline(((0, high), (1, high), (9, low), (10, low)), (0, 10), (low, high), 2) == "█▁"
    assert all(math.isfinite(mark) for mark in ticks(low, high))
    for line in (((0, low), (5, high)), ((0, high), (5, high))):
        drawn = plot(Curve("x", "", (line,)), ("A",))
        assert not re.search("nan|inf", drawn.replace("<svg", ""))
        assert len(drawn) < 10_000


def test_a_line_is_torn_where_it_is_not_finite_and_lies_within_the_plot() -> None:
    lines = (((0, 2.0), (1, 1.0), (2, math.nan), (3, 1.0), (4, 0.5)), ((2, 1.5),), ())
    root = ET.fromstring(plot(Curve("eval/loss", "nats", lines), ("A", "B", "C")))
    paths = root.findall(f"{SVG}path")
    assert [path.get("d", "").count("L") for path in paths] == [1, 1]
    assert len(root.findall(f"{SVG}circle")) == 1
    numbers = [
        [float(part) for part in point.split(",")]
        for path in paths
        for point in path.get("d", "").removeprefix("M").split("L")
    ]
    assert all(70 <= x <= 890 and 10 <= y <= 270 for x, y in numbers)
    assert {text.text for text in root.findall(f"{SVG}text") if text.get("class") == "name"} == {"A", "B"}


def test_without_finite_values_there_is_no_plot() -> None:
    assert plot(Curve("x", "", (((0, math.nan),), ())), ("A", "B")) == ""
    assert "<svg" in plot(Curve("x", "", (((0, 1.0), (5, 1.0)),)), ("A",))
