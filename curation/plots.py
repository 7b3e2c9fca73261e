"""Plots as inline SVG: no script, no font, no address. Colours are the page's custom properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDE, HALF = 920, 450


class Bar(NamedTuple):
    """A labelled row of segments: (CSS colour variable, value, tooltip)."""

    label: str
    segments: Sequence[tuple[str, int, str]]
    note: str = ""


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars, each made of segments, with labels on the left and a note on the right."""
    if not rows:
        return ""
    labels = [row.label if len(row.label) <= 26 else f"{row.label[:12]}…{row.label[-13:]}" for row in rows]
    label_width = max(170, 24 + 8 * max(map(len, labels)))
    largest = max(1, *(sum(value for _, value, _ in row.segments) for row in rows))
    pitch, thick = 30, 16
    room = WIDE - label_width - 150
    parts = []
    for index, (row, label) in enumerate(zip(rows, labels, strict=True)):
        top = index * pitch
        parts.append(
            f'<text x="{label_width - 12}" y="{top + 20}" class="label" text-anchor="end">{escape(label)}'
            f"<title>{escape(row.label)}</title></text>"
        )
        parts.append(f'<rect x="{label_width}" y="{top + 7}" width="{room}" height="{thick}" rx="4" class="track"/>')
        x = float(label_width)
        for colour, value, tip in row.segments:
            if not value:
                continue
            # The smallest count is still a visible sliver.
            width = max(1.5, value / largest * room)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 7}" width="{width:.1f}" height="{thick}" rx="2" fill="var({colour})">'
                f"<title>{escape(tip)}</title></rect>"
            )
            x += width
        parts.append(f'<text x="{WIDE - 138}" y="{top + 20}" class="note">{escape(row.note)}</text>')
    return _svg(parts, WIDE, len(rows) * pitch + 4, title)


def histogram(bins: Mapping[str, Sequence[int]], edges: Sequence[int], colours: Mapping[str, str], title: str) -> str:
    """Stacked columns over bins whose edges grow 1, 2, 5, 10; empty ends are cut off."""
    totals = [sum(values) for values in zip(*bins.values(), strict=True)]
    filled = [index for index, total in enumerate(totals) if total]
    if not filled:
        return ""
    first, last = max(0, filled[0] - 1), min(len(totals) - 1, filled[-1] + 1)
    height, left, base = 150, 44, 168
    largest = max(totals)
    step = (HALF - left - 10) / (last - first + 1)
    parts = []
    for share in (0.5, 1.0):
        y = base - share * height
        parts.append(f'<line x1="{left}" x2="{HALF}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        rows = short(round(largest * share))
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="tick" text-anchor="end">{rows}</text>')
    parts.append(f'<line x1="{left}" x2="{HALF}" y1="{base}" y2="{base}" class="axis"/>')
    for index in range(first, last + 1):
        x = left + (index - first) * step
        y = float(base)
        low = edges[index - 1] if index else 0
        high = short(edges[index]) if index < len(edges) else "∞"
        for split, values in bins.items():
            if not values[index]:
                continue
            tall = max(1.0, values[index] / largest * height)
            y -= tall
            tip = f"{split}: {values[index]:,} rows from {short(low)} to below {high}"
            parts.append(
                f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" rx="2"'
                f' fill="var({colours[split]})"><title>{escape(tip)}</title></rect>'
            )
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" class="tick" text-anchor="middle">{short(low)}</text>')
    return _svg(parts, HALF, base + 24, title)


def short(number: int) -> str:
    """1234 as 1.2k."""
    for size, sign in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + sign
    return str(number)


def _svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}"'
        f' xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
