"""Where a figure lies on a scale, of any floats: sums and distances of the largest are no floats any more. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value; not finite only if one of them is not."""
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def share(value: float, low: float, high: float) -> float:
    """How far a finite value lies from the low to the high end, 0 to 1; the middle of a scale without height."""
    if math.isinf(high - low):
        value, low, high = value / 2, low / 2, high / 2
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5
