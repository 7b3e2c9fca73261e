"""Progress of a job, read from its log: lines `@progress {"step": 12, "steps": 120, "loss": 3.21}`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

MARK: Final = "@progress "
_MOST: Final = 1 << 53  # steps; a float counts no further
_VALUES: Final = 100
_LIMIT: Final = 4096  # characters; a longer line is not ours


@dataclass(frozen=True)
class Progress:
    """
    :param step, steps: steps done and to do.
    :param values: the other numbers of the line, by name (loss, tokens_per_second, ...), the first 100.
    """

    step: int
    steps: int | None = None
    values: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "steps": self.steps, **self.values}

    @classmethod
    def from_dict(cls, data: Any) -> Progress | None:
        """A progress from plain values, or None if they are none."""
        if not isinstance(data, dict):
            return None
        step, steps = _whole(data.get("step")), _whole(data.get("steps"))
        if step is None:
            return None
        found = ((str(key), value) for key, value in data.items() if key not in ("step", "steps"))
        values = {key: float(value) for key, value in found if key.isprintable() and _is_finite(value)}
        return cls(step, steps, dict(islice(values.items(), _VALUES)))

    def __str__(self) -> str:
        share = f" of {self.steps}" if self.steps is not None else ""
        rest = "".join(f", {key} {value:g}" for key, value in self.values.items())
        return f"step {self.step}{share}{rest}"


def parse(line: str) -> Progress | None:
    """The progress that a log line tells, or None. A mark with anything else behind it is an ordinary line."""
    text = line.strip()
    if not text.startswith(MARK) or len(text) > _LIMIT:
        return None
    try:
        return Progress.from_dict(json.loads(text[len(MARK) :]))
    except (ValueError, OverflowError, RecursionError):
        return None


def for_people(lines: Iterable[str]) -> list[str]:
    """The lines without those that tell programs a progress."""
    return [line for line in lines if parse(line) is None]


def last(lines: Iterable[str]) -> Progress | None:
    """The newest progress among the lines."""
    found: Progress | None = None
    for line in lines:
        found = parse(line) or found
    return found


def _is_finite(value: Any) -> bool:
    """Whether a value is a number. :raises OverflowError: for one that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> int | None:
    return int(value) if _is_finite(value) and 0 <= value < _MOST else None
