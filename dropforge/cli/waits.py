"""What a run waits for, and when its turn may come. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

_WORDS: Final = {
    "scheduled": "a free slot of Airflow",
    "queued": "a free slot of Airflow",
    "up_for_retry": "its next try, after a failure",
}


@dataclass(frozen=True)
class Wait:
    """A run that waits.

    :param stage: where; empty before the first. :param place: where it queues: `airflow`, `family`, `person`, or
        `machine` or the name of a cluster's queue, where it can be held back.
    :param position: 1 is the next; None where there is no order, or nobody tells it. :param eta: seconds from now.
    """

    run: str
    dag_run: str
    stage: str
    place: str
    reason: str
    position: int | None = None
    priority: int = 0
    held: bool = False
    eta: float | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"eta": None if self.eta is None else round(self.eta)}


class Amount(Protocol):
    """What jobs use of a machine."""

    def __add__(self, other: Any, /) -> Any: ...

    def __sub__(self, other: Any, /) -> Any: ...

    def missing(self, free: Any, /) -> str: ...


def starts(
    free: Any, working: Sequence[tuple[Amount, float | None]], waiting: Sequence[tuple[Amount, float | None]]
) -> list[float | None]:
    """In how many seconds each waiting job starts; None where it cannot be known.

    :param free: what nobody uses now. :param working: what each job uses, and for how long still; None if unknown.
    :param waiting: what each needs, in the order of the queue, and how long it will take. Nobody overtakes.
    """
    now, found = 0.0, []
    ends = [(math.inf if left is None else max(0.0, left), uses) for uses, left in working]
    for needs, lasts in waiting:
        while now < math.inf and needs.missing(free):
            if not ends:
                now = math.inf  # it never fits
                break
            first = min(ends, key=lambda item: item[0])
            ends.remove(first)
            now, free = max(now, first[0]), free + first[1]
        found.append(None if math.isinf(now) else now)
        free = free - needs
        ends.append((math.inf if lasts is None else now + lasts, needs))
    return found


def in_airflow(state: str) -> str:
    """What a task in this state waits for; empty if it does not wait."""
    return _WORDS.get(state, "")


def average(seconds: Sequence[float]) -> float | None:
    """How long the runs of a family take; None where none has ended."""
    known = [value for value in seconds if math.isfinite(value) and value > 0]
    return sum(known) / len(known) if known else None


def rank(waits: Sequence[Wait]) -> list[Wait]:
    """As they are listed: by place, then by position; those without one last."""
    return sorted(waits, key=lambda wait: (wait.place, wait.position is None, wait.position or 0, wait.dag_run))


def duration(seconds: float | None) -> str:
    """`~ 2 h 05 min`; a dash for what is not known."""
    if seconds is None:
        return "-"
    minutes = max(1, round(seconds / 60))
    return f"~ {minutes} min" if minutes < 60 else f"~ {minutes // 60} h {minutes % 60:02d} min"
