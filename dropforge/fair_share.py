"""Whose drop goes next: of the families that wait, the one with the fewest runs in flight, and none beyond its limit.

Pure. A run is in flight from the moment when its drop's event is sent until it has ended.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from dropforge.errors import DropforgeError
from dropforge.intake_rules import Waiting

VARIABLE: Final = "DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY"
_MOST: Final = 1000
_NUMBER: Final = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class RunSlots:
    """How many runs there may be at once; None for any number.

    :param total: of all families, as Airflow has it. :param per_family: of one family, unless its file says otherwise.
    """

    total: int | None = None
    per_family: int | None = None


@dataclass(frozen=True)
class FamilyLoad:
    """What is known of a family's share.

    :param waiting: its drops whose event was never sent. :param in_flight: its runs.
    :param limit: `intake.max_active_runs` of its file; None if the file does not say.
    """

    waiting: Sequence[Waiting] = ()
    in_flight: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class Share:
    """:param go: ids by family and in their order. :param held: id to the reason, by family."""

    go: tuple[tuple[str, str], ...] = ()
    held: Mapping[tuple[str, str], str] = field(default_factory=dict)


def share(families: Mapping[str, FamilyLoad], slots: RunSlots, taken: int, now: datetime) -> Share:
    """Hand out what is free, one run at a time; a family without any run gets one in any case.

    So others' runs keep nobody out: what Airflow cannot begin yet stands in its queue, with one run of each family.

    :param taken: runs of all kinds that have a slot, or wait for one.
    """
    queues = {name: deque(sorted(one.waiting, key=lambda drop: drop.age(now))) for name, one in families.items()}
    # The family with the fewest runs is next; of two with as many, the one whose drop has waited longer.
    order = [(families[name].in_flight, queue[0].age(now), name) for name, queue in queues.items() if queue]
    heapq.heapify(order)
    go: list[tuple[str, str]] = []
    while order:
        flying, _, name = heapq.heappop(order)
        full = slots.total is not None and taken + len(go) >= slots.total
        if full and flying:
            break  # the others have as many at least
        limit, _ = _limit(families[name], slots)
        if limit is not None and flying >= limit:
            continue
        go.append((name, queues[name].popleft().id))
        if queues[name]:
            heapq.heappush(order, (flying + 1, queues[name][0].age(now), name))
    held = {(name, drop.id): _reason(families[name], slots) for name, queue in queues.items() for drop in queue}
    return Share(tuple(go), held)


def slots_of(total: int, env: Mapping[str, str] = os.environ) -> RunSlots:
    """The installation's slots. :param total: Airflow's limit of active runs; below 1 there is none.

    :raises DropforgeError: if the limit of a family is no number.
    """
    text = env.get(VARIABLE, "").strip()
    if text and not (_NUMBER.fullmatch(text) and int(text) <= _MOST):
        raise DropforgeError(
            f"environment variable {VARIABLE}",
            f"{text!r:.60} is no whole number up to {_MOST}",
            "Write how many runs of one family there may be at once, as 4; 0 for any number",
        )
    if text:
        return RunSlots(total if total > 0 else None, int(text) or None)
    # By half of the slots no family can take them all.
    return RunSlots(total, max(1, total // 2)) if total > 0 else RunSlots()


def _limit(family: FamilyLoad, slots: RunSlots) -> tuple[int | None, str]:
    """How many runs of a family there may be, and where that is said."""
    return (family.limit, "intake.max_active_runs") if family.limit else (slots.per_family, VARIABLE)


def _reason(family: FamilyLoad, slots: RunSlots) -> str:
    """The same as long as the limits are, so that a drop is told once."""
    own, where = _limit(family, slots)
    limits = [f"{own} of its family ({where})"] if own else []
    limits += [f"{slots.total} of all (Airflow's max_active_runs_per_dag)"] if slots.total else []
    return f"it waits until a run has ended: there are at most {' and '.join(limits)} at once"
