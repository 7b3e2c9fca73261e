"""How values are written, in the terminal and on the page alike."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from os.path import commonprefix

from dropforge.comparison import Change

_BEFORE = 12  # characters that are shown before the first difference


def visible(text: str, keep: str = " ") -> str:
    """Control, reordering and unseen characters as codes: values come from outside. :param keep: those left alone."""
    return "".join(
        char
        if char in keep or unicodedata.category(char) not in {"Cc", "Cf", "Zl", "Zp", "Co", "Cs"}
        else f"\\u{ord(char):04x}"
        for char in text
    )


def excerpts(values: Sequence[str | None], most: int) -> list[str | None]:
    """Values of at most so many characters; of longer ones the part where they begin to differ."""
    known = [value for value in values if value is not None]
    first = len(commonprefix(known)) if len(set(known)) > 1 else 0  # noqa: RUF071 - texts, and no paths
    start = max(0, first - _BEFORE) if any(len(value) > most for value in known) and first > most // 2 else 0
    return [None if value is None else _cut(value, start, most) for value in values]


def figure(value: float | None) -> str:
    """A number as people read it."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}".replace("-", "−")
    text = f"{value:,.1f}" if 1000 <= size < 1e15 else f"{value:.4f}" if 0.01 <= size < 1000 else f"{value:.3g}"
    return f"−{text[1:]}" if text.startswith("-") else text


def difference(change: Change | None) -> str:
    """How far a value lies from the first run's; empty where that cannot be said."""
    if change is None:
        return ""
    if not change.absolute:
        return "="
    sign = "+" if change.absolute > 0 else "−"
    share = f" ({sign}{_percent(abs(change.percent))})" if change.percent is not None else ""
    return f"{sign}{figure(abs(change.absolute))}{share}"


def counted(number: int, what: str) -> str:
    """`1 param is the same`, `3 params are the same`."""
    return f"{number:,} {what}{' is' if number == 1 else 's are'} the same"


def _percent(value: float) -> str:
    return f"{value:,.0f}%" if value >= 100 else f"{value:.2g}%" if value < 1 else f"{value:.1f}%"


def _cut(value: str, start: int, most: int) -> str:
    if not start and len(value) <= most:
        return value
    head = "…" if start else ""
    rest = value[start:]
    return f"{head}{rest}" if len(rest) <= most - len(head) else f"{head}{rest[: most - 1 - len(head)]}…"
