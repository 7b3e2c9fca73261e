"""Before the first step: each epoch holds each document as often as it should, and ranks share steps without overlap.

The plan's digest says that ranks have the same plan; this says that it is a right one, from what each rank will take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError, DropforgeError
from dropforge.text import counted
from trainer.data.packing import Pack
from trainer.data.plan import Plan
from trainer.gang import Gang

_PLACES: Final = 4_000_000  # documents that a rank counts in epochs; a second or two
_STEPS: Final = 32  # at most, that ranks compare besides the first and the last
_TOLD: Final = 5  # documents that a message names
_MEND: Final = "Remove `plan/` from the run's folder, so that the plan is made again, or start a new run"


@dataclass(frozen=True)
class Proof:
    """What was looked at, and found right.

    :param epochs: of the training; `epochs_counted` of them were counted document by document.
    :param steps_compared: steps of which all ranks told what they will take.
    """

    documents: int
    epochs: int
    epochs_counted: int
    steps_compared: int
    ranks: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def prove(plan: Plan, gang: Gang, micro: int) -> Proof:
    """Look at the epochs, each rank at some of them, and at what the ranks take; a collective.

    All epochs are counted up to a few million documents, beyond that the first, the last and some between.

    :param micro: most packs of a forward pass.
    :raises DataError, DropforgeError: on every rank, for the first thing that is wrong on any.
    """
    epochs = math.ceil(plan.steps * plan.rows / plan.packs_per_epoch)
    if plan.packs is not None:
        epochs = math.ceil(plan.packs / plan.packs_per_epoch)
    alone = max(2, _PLACES // len(plan.lengths))
    counted = _some(epochs, gang.world * alone)
    together(gang, (partial(count_epoch, plan, epoch) for epoch in counted[gang.rank :: gang.world]))
    steps = {step: plan.step(step) for step in _steps(plan, _some(epochs, alone))}
    own = [taken(plan, packs, gang.rank, gang.world, micro) for packs in steps.values()]
    every = gang.gather([(count, documents.tobytes()) for count, documents in own])
    told = [[(count, np.frombuffer(data, np.int64)) for count, data in part] for part in every]
    pairs = zip(steps.items(), zip(*told, strict=True), strict=True)
    together(gang, (partial(compare, step, packs, some) for (step, packs), some in pairs))
    return Proof(len(plan.lengths), epochs, len(counted), len(steps), gang.world)


def count_epoch(plan: Plan, index: int) -> None:
    """:raises DataError: if a document is missing, or there too often, or a pack holds more than fits."""
    epoch = plan.epoch(index)
    times = epoch.times(len(plan.lengths))
    source = np.zeros(len(times), np.int32) if plan.mix is None else plan.mix.source
    bounds = np.array([epoch.bounds.get(number, (0, 0)) for number in range(int(source.max()) + 1)])
    least, most = bounds[source].T
    for wrong, word in ((np.flatnonzero(times < least), "missing"), (np.flatnonzero(times > most), "too often")):
        if len(wrong):
            raise DataError(f"the plan, epoch {index + 1}", f"{_named(wrong)} {word} in it", _MEND)
    ends = np.cumsum(plan.lengths[epoch.documents])
    before = np.concatenate([[0], ends])
    full = before[epoch.ends] - before[epoch.starts]
    if int(full.max()) > plan.size:
        cause = f"a pack holds {int(full.max())} tokens, {plan.size} fit"
        raise DataError(f"the plan, epoch {index + 1}", cause, _MEND)


def taken(plan: Plan, packs: list[Pack], rank: int, world: int, micro: int) -> tuple[int, NDArray[np.int64]]:
    """A rank's forward passes in a step, and the documents in them."""
    batches = plan.share(packs, rank, world, micro)
    return len(batches), np.concatenate([np.zeros(0, np.int64), *(pack for batch in batches for pack in batch)])


def compare(step: int, packs: list[Pack], told: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """:param told: what each rank takes, by rank. :raises DropforgeError: if together it is not the step's packs."""
    thing = f"step {step + 1} over {counted(len(told), 'rank')}"
    passes = [count for count, _ in told]
    if len(set(passes)) > 1:
        raise DropforgeError(thing, f"ranks have {passes} forward passes, which would hang", _MEND)
    mine = np.concatenate(packs)
    every = np.concatenate([documents for _, documents in told])
    names = np.union1d(mine, every)
    whole, found = (np.bincount(np.searchsorted(names, some), minlength=len(names)) for some in (mine, every))
    for wrong, word in ((names[found > whole], "taken too often"), (names[found < whole], "missing")):
        if len(wrong):
            ranks = [rank for rank, (_, own) in enumerate(told) if np.isin(wrong[:_TOLD], own).any()]
            by = f", by ranks {', '.join(map(str, ranks))}" if ranks else ""
            mend = "Run the same image on all nodes, with the same run.json"
            raise DropforgeError(thing, f"{_named(wrong)} {word}{by}", mend)


def together(gang: Gang, checks: Iterable[Callable[[], None]]) -> None:
    """Do checks on all ranks. :raises DropforgeError: on every rank, what the first that failed has raised."""
    failure: DropforgeError | None = None
    try:
        for check in checks:
            check()
    except DropforgeError as error:
        failure = error
    for one in gang.gather(failure):
        if one is not None:
            raise one


def _named(documents: NDArray[np.int64]) -> str:
    names = ", ".join(map(str, documents[:_TOLD].tolist()))
    more = f" and {len(documents) - _TOLD} more" if len(documents) > _TOLD else ""
    return f"document{'s' if len(documents) > 1 else ''} {names}{more} {'are' if len(documents) > 1 else 'is'}"


def _steps(plan: Plan, epochs: list[int]) -> list[int]:
    """All steps; of many the first, the last and some that lie in `epochs`, the same on every rank."""
    if plan.steps <= _STEPS + 2:
        return list(range(plan.steps))
    places = np.random.default_rng(plan.steps).integers(0, plan.packs_per_epoch, _STEPS).tolist()
    starts = (epochs[index % len(epochs)] * plan.packs_per_epoch for index in range(_STEPS))
    between = {(start + place) // plan.rows for start, place in zip(starts, places, strict=True)}
    return sorted({0, plan.steps - 1, *(step for step in between if step < plan.steps)})


def _some(count: int, most: int) -> list[int]:
    """Indices below `count`: all, or the first, the last and some between, the same on every rank."""
    if count <= most:
        return list(range(count))
    between = np.random.default_rng(count).choice(np.arange(1, count - 1), most - 2, replace=False)
    return [0, *sorted(between.tolist()), count - 1]
