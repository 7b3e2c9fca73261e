"""The points of a training's curves: few enough to travel in each checkpoint, so that a resumed run has one curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

COLUMNS: Final = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "peak_rss_megabytes",
    "cuda_peak_reserved_megabytes",
    "mfu",
)
MOST: Final = 400


class Points:
    """Every log step, until there are too many: from then on every second of them, of those before too, and so on."""

    def __init__(self, rows: Sequence[Sequence[float | None]] = (), stride: int = 1, count: int = 0) -> None:
        self.rows = [list(row) for row in rows]
        self.stride, self.count = stride, count

    def add(self, step: int, facts: Mapping[str, float]) -> None:
        """Take a log step; what is missing or not finite leaves a gap."""
        if self.count % self.stride == 0:
            values = {"step": step, **facts}
            self.rows.append([_number(values.get(name)) for name in COLUMNS])
        self.count += 1
        if len(self.rows) > MOST:
            self.rows, self.stride = self.rows[::2], 2 * self.stride

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values, where there are any."""
        place = COLUMNS.index(name)
        found = [(row[0], row[place]) for row in self.rows if row[place] is not None]
        return [float(step or 0) for step, _ in found], [float(value or 0.0) for _, value in found]

    def plain(self) -> dict[str, Any]:
        return {"columns": list(COLUMNS), "rows": self.rows, "stride": self.stride, "count": self.count}

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Points:
        """From a checkpoint; those of another version, with other columns, are left behind."""
        if values.get("columns") != list(COLUMNS):
            return cls()
        return cls(values["rows"], int(values["stride"]), int(values["count"]))


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
