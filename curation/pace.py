"""How fast a stage goes and when it ends, in one line for people."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

#: What `done` and `total` of a stage count; all others count steps.
_UNITS: Final = {"fetch": "bytes", "read": "bytes", "write": "rows", "publish": "files"}
#: Seconds that the rate looks back, so that splits which an earlier try finished are soon forgotten.
_WINDOW: Final = 60.0
#: Seconds within which a rate says nothing yet.
_SOON: Final = 1.0


class Pace:
    """Follows the stages of a curation; called as its `progress`, then asked for a line.

    :param clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.stage, self.done, self.total, self.rows = "", 0, 0, 0
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, stage: str, done: int, total: int, rows: int = 0) -> None:
        """Take what is done. :param rows: input rows read until now, where the stage counts bytes."""
        now = self._clock()
        if stage != self.stage:
            self.stage = stage
            self._seen.clear()
        self.done, self.total, self.rows = done, total, rows
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Units a second over the last minute, or None where it is too soon to say."""
        if not self._seen:
            return None
        (first, before), (last, done) = self._seen[0], self._seen[-1]
        return (done - before) / (last - first) if last - first >= _SOON and done > before else None

    @property
    def left(self) -> float | None:
        """Seconds to the end of the stage at this rate, or None where it is too soon to say."""
        rate = self.rate
        return None if rate is None else (self.total - self.done) / rate

    def line(self) -> str:
        """As `read: 1.2 of 4.0 GB, 310,000 rows, 52.0 MB/s, 54 s left`."""
        unit, rate, left = _UNITS.get(self.stage, "steps"), self.rate, self.left
        parts = [_amount(self.done, self.total, unit)]
        parts += [f"{self.rows:,} rows"] if self.rows else []
        if rate is not None and left is not None and unit != "steps":
            size, name = _scale(rate)
            parts.append(f"{rate / size:.1f} {name}/s" if unit == "bytes" else f"{rate:,.0f} {unit}/s")
            parts += [f"{duration(left)} left"] if self.done < self.total else []
        return f"{self.stage}: {', '.join(parts)}"


class Lines:
    """Says a line when a stage ends, and every few seconds within it; called as the `progress` of curation.

    :param say: takes a line.
    """

    def __init__(
        self, say: Callable[[str], None], every: float = 5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._pace, self._said = Pace(clock), 0.0

    def __call__(self, stage: str, done: int, total: int, rows: int = 0) -> None:
        now, new = self._clock(), stage != self._pace.stage
        self._pace(stage, done, total, rows)
        if new:
            self._said = now
        if done == total or now - self._said >= self._every:
            self._said = now
            self._say(self._pace.line())


def duration(seconds: float) -> str:
    """As `54 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _amount(done: int, total: int, unit: str) -> str:
    if unit != "bytes":
        return f"{done:,} of {total:,}" + (f" {unit}" if unit != "steps" else "")
    size, name = _scale(total)
    return f"{done / size:.1f} of {total / size:.1f} {name}" if size > 1 else f"{done} of {total} B"


def _scale(amount: float) -> tuple[int, str]:
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if amount >= size:
            return size, name
    return 1, "B"
