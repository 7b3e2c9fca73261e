"""Plots as inline SVG: no script, no font, no address. Colours are the page's custom properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from curation.page import visible

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
    labels, label_width = _labels([row.label for row in rows])
    largest = max(1, *(sum(value for _, value, _ in row.segments) for row in rows))
    pitch, thick = 30, 16
    room = WIDE - label_width - 150
    parts = []
    for index, (row, label) in enumerate(zip(rows, labels, strict=True)):
        top = index * pitch
        parts.append(
            f'<text x="{label_width - 12}" y="{top + 20}" class="label" text-anchor="end">{escape(label)}'
            f"<title>{escape(visible(row.label))}</title></text>"
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
                f"<title>{escape(visible(tip))}</title></rect>"
            )
            x += width
        parts.append(f'<text x="{WIDE - 138}" y="{top + 20}" class="note">{escape(visible(row.note))}</text>')
    return _svg(parts, WIDE, len(rows) * pitch + 4, title)


def pairs(rows: Sequence[tuple[str, float, float]], title: str) -> str:
    """Two thin bars for each name, a share before and one now, as long as they are of the largest.

    :param rows: (name, share before, share now), shares from 0 to 1.
    """
    if not rows:
        return ""
    labels, label_width = _labels([name for name, _, _ in rows])
    largest = max(max(before, after) for _, before, after in rows) or 1.0
    pitch, thick, room = 42, 15, WIDE - label_width - 150
    parts = []
    for index, ((name, *shares), label) in enumerate(zip(rows, labels, strict=True)):
        top = index * pitch + 4
        tip = f"{name}: {shares[0]:.2%} before, {shares[1]:.2%} now"
        parts.append(
            f'<text x="{label_width - 12}" y="{top + 20}" class="label" text-anchor="end">{escape(label)}'
            f"<title>{escape(visible(name))}</title></text>"
        )
        for number, (share, colour) in enumerate(zip(shares, ("--before", "--train"), strict=True)):
            y = top + number * (thick + 1)
            width = max(1.5, share / largest * room) if share else 0
            parts.append(
                f'<rect x="{label_width}" y="{y}" width="{room}" height="{thick}" class="track"/>'
                f'<rect x="{label_width}" y="{y}" width="{width:.1f}" height="{thick}" rx="2" fill="var({colour})">'
                f"<title>{escape(visible(tip))}</title></rect>"
                f'<text x="{WIDE - 138}" y="{y + 12}" class="note">{share:.1%}</text>'
            )
    return _svg(parts, WIDE, len(rows) * pitch + 4, title)


def _labels(names: Sequence[str]) -> tuple[list[str], int]:
    """Names that are not too long, and the room that they take."""
    names = [visible(name) for name in names]
    labels = [name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}" for name in names]
    return labels, max(170, 24 + 8 * max(map(len, labels)))


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
                f' fill="var({colours[split]})"><title>{escape(visible(tip))}</title></rect>'
            )
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" class="tick" text-anchor="middle">{short(low)}</text>')
    return _svg(parts, HALF, base + 24, title)


def outline(before: Sequence[int], after: Sequence[int], edges: Sequence[int], title: str) -> str:
    """Two histograms over each other, each as shares of its own rows: the one before filled, the one after as a line.

    :param before, after: rows whose value is below each edge, and behind the last one.
    """
    shares = [(one / max(1, sum(before)), two / max(1, sum(after))) for one, two in zip(before, after, strict=True)]
    filled = [index for index, pair in enumerate(shares) if any(pair)]
    if not filled:
        return ""
    first, last = max(0, filled[0] - 1), min(len(shares) - 1, filled[-1] + 1)
    height, left, base = 150, 44, 168
    largest = max(max(pair) for pair in shares)
    step = (HALF - left - 10) / (last - first + 1)
    parts, line = [], f"M{left},{base}"
    for part in (0.5, 1.0):
        y = base - part * height
        parts.append(f'<line x1="{left}" x2="{HALF}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="tick" text-anchor="end">{part * largest:.0%}</text>')
    for index in range(first, last + 1):
        one, two = shares[index]
        x, low = left + (index - first) * step, edges[index - 1] if index else 0
        top = base - two / largest * height
        tall = one / largest * height
        high = short(edges[index]) if index < len(edges) else "∞"
        tip = f"from {short(low)} to below {high}: {one:.1%} before, {two:.1%} now"
        parts.append(
            f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{step:.1f}" height="{tall:.1f}" fill="var(--before)"/>'
            f'<rect x="{x:.1f}" y="{base - height}" width="{step:.1f}" height="{height}" fill-opacity="0">'
            f"<title>{escape(visible(tip))}</title></rect>"
        )
        line += f"V{top:.1f}H{x + step:.1f}"
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" class="tick" text-anchor="middle">{short(low)}</text>')
    parts.append(
        f'<path d="{line}V{base}" fill="none" stroke="var(--train)" stroke-width="2.5" pointer-events="none"/>'
    )
    parts.append(f'<line x1="{left}" x2="{HALF}" y1="{base}" y2="{base}" class="axis"/>')
    return _svg(parts, HALF, base + 24, title)


def short(number: int) -> str:
    """1234 as 1.2k."""
    for size, sign in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + sign
    return str(number)


def _svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    kind = ' class="wide"' if width == WIDE else ""
    return (
        f'<svg viewBox="0 0 {width} {height}"{kind} role="img" aria-label="{escape(title, quote=True)}"'
        f' xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
