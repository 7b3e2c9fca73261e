"""Intervals in steps or in minutes: `50`, or `"10 min"`.

Steps are counted by every rank. Minutes are measured by rank 0 alone, whose word goes to all ranks in the collective of
the step, so that they act at the same one. Neither touches the order of the data.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_MINUTES: Final = re.compile(r"([1-9][0-9]*) ?min")


@dataclass(frozen=True)
class Interval:
    """:param steps: optimizer steps, 0 for never. :param seconds: wall time, if it is not in steps."""

    steps: int = 0
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> Interval:
        """Read a recipe's value. :raises ValueError: if it is none."""
        if isinstance(value, int):
            if value < 0:
                raise ValueError(f"{value} is negative")
            return cls(steps=value)
        found = _MINUTES.fullmatch(value)
        if not found:
            raise ValueError(f"{value!r} is neither a number of steps nor minutes as in '10 min'")
        return cls(seconds=60.0 * int(found[1]))

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.seconds is None else f"{self.seconds / 60:g} min"

    def due(self, step: int) -> bool:
        """Whether an interval in steps ends with this many steps."""
        return bool(self.steps) and step > 0 and step % self.steps == 0


@dataclass(frozen=True)
class Due:
    """What is to be done after a step because its time has come.

    :param profile: steps to profile from the next one on.
    """

    log: bool = False
    evaluation: bool = False
    checkpoint: bool = False
    fast: bool = False
    profile: int = 0


class Timers:
    """The clock behind intervals in minutes; only that of rank 0 counts.

    :param intervals: by the names in `Due`.
    """

    def __init__(self, intervals: Mapping[str, Interval], clock: Callable[[], float] = time.monotonic) -> None:
        self._intervals, self._clock = intervals, clock
        self._since = dict.fromkeys(intervals, clock())

    def due(self) -> Due:
        """Whose time is over."""
        now = self._clock()
        return Due(
            **{
                name: interval.seconds is not None and now - self._since[name] >= interval.seconds
                for name, interval in self._intervals.items()
            }
        )

    def restart(self, name: str) -> None:
        """Begin an interval anew."""
        self._since[name] = self._clock()
