"""Curves as inline SVG: no script, no font, no address. Colours are the page's custom properties."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from dropforge.cli.comparing.texts import figure
from dropforge.comparison import Curve, Points, thin
from dropforge.scales import share

COLOURS: Final = 10  # --c0 to --c9 of the page
_DASHES: Final = ("", "7 4", "2 3", "9 3 2 3", "14 4")
_MOST: Final = 300  # points of a line
_WIDE, _HIGH = 920, 320
_LEFT, _RIGHT, _TOP, _BASE = 74, 880, 14, 268
_NAMED: Final = 8  # lines that have their letter at their end
_LARGEST: Final = sys.float_info.max
_LINE: Final = 15  # height of a letter


def colour(place: int) -> str:
    """The colour of a run, in every plot and table."""
    return f"var(--c{place % COLOURS})"


def dash(place: int) -> str:
    """What tells apart runs that share a colour; empty for a whole line."""
    return _DASHES[place // COLOURS % len(_DASHES)]


def plot(curve: Curve, letters: Sequence[str]) -> str:
    """The lines of all runs over optimizer steps, on one scale; empty if there is nothing to draw."""
    values = curve.finite
    if not values:
        return ""
    low, high = min(values), max(values)
    if low == high:  # a scale needs a height
        room = (abs(low) or 1) / 10
        low, high = max(-_LARGEST, low - room), min(_LARGEST, high + room)
    first, last = curve.steps
    marks = ticks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(1, last - first) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BASE - share(value, low, high) * (_BASE - _TOP)

    parts = []
    for mark in marks:
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" class="grid"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y(mark) + 4:.1f}" class="tick" text-anchor="end">{_short(mark)}</text>'
        )
    parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{_BASE}" y2="{_BASE}" class="axis"/>')
    for mark in ticks(first, last, whole=True):
        parts.append(
            f'<text x="{x(mark):.1f}" y="{_BASE + 20}" class="tick" text-anchor="middle">{_short(mark)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BASE + 44}" class="tick" text-anchor="middle">optimizer step</text>'
    )
    ends = []
    for place, (line, letter) in enumerate(zip(curve.lines, letters, strict=True)):
        shown = thin(line, _MOST)
        told = f"{letter}: {figure(line[0][1])} → {figure(line[-1][1])}" if line else ""
        style = f'stroke="{colour(place)}"' + (f' stroke-dasharray="{dash(place)}"' if dash(place) else "")
        for piece in _pieces(shown):
            if len(piece) == 1:
                (step, value) = piece[0]
                shape = f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour(place)}">'
                parts.append(f"{shape}<title>{escape(told)}</title></circle>")
                continue
            path = "L".join(f"{x(step):.1f},{y(value):.1f}" for step, value in piece)
            parts.append(f'<path d="M{path}" class="line" {style}><title>{escape(told)}</title></path>')
        finite = [point for point in shown if math.isfinite(point[1])]
        if finite:
            ends.append((y(finite[-1][1]), x(finite[-1][0]), place, letter))
    if len(ends) <= _NAMED:
        parts += _names(ends)
    title = escape(f"{curve.name} by optimizer step", quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers from one value to the other. :param whole: no fractions."""
    if not high > low:
        return [low]
    rough = high / 5 - low / 5  # the difference of the largest floats is none
    if rough < sys.float_info.min:  # nothing is between them that has all its digits
        return [low, high]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= rough), size * 10)
    if whole:
        step = max(1.0, step)
    # Multiplied, not added up: sums of fractions are not round.
    return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _pieces(points: Points) -> Iterator[Points]:
    """A line is torn where a value is not finite."""
    piece: list[tuple[int, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield tuple(piece)
            piece = []
    if piece:
        yield tuple(piece)


def _names(ends: Sequence[tuple[float, float, int, str]]) -> Iterator[str]:
    """The letters at the ends of the lines, none on another one."""
    lowest = -math.inf
    for y, x, place, letter in sorted(ends):
        at = max(y, lowest + _LINE)
        lowest = at
        yield f'<text x="{x + 7:.1f}" y="{at + 4:.1f}" class="name" style="fill:{colour(place)}">{letter}</text>'


def _short(value: float) -> str:
    """A round number without the zeros behind it."""
    return f"{round(value):,}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"
