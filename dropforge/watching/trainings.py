"""What an open run's folder says that MLflow does not: whether it has begun, what is saved, what gangs hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dropforge import gangs, layout
from dropforge.errors import DropforgeError
from dropforge.gangs import Gang
from dropforge.json_objects import UNREADABLE, read_object
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, Store

_STEP: Final = re.compile(r"step-(\d{1,12})")
_LOOKS: Final = 3  # checkpoints that are looked at, the newest first: one may still be in the making


@dataclass(frozen=True)
class Folder:
    """Times are in seconds since 1970.

    :param queued: since when the pods of its training wait; None before its job is made, and once it has begun.
    :param began: when its first launcher started; None before. :param trained: whether its model is there,
        so that it is evaluated and judged now. :param saved: of the newest complete
        checkpoint, or when the attempt began that has none: what came since would be lost. None if they lie elsewhere.
    :param gpus, cores: of gangs that have begun and not ended. :param gpu_seconds, core_seconds: of all until now.
    """

    queued: float | None = None
    began: float | None = None
    trained: bool = False
    saved: float | None = None
    gpus: float = 0.0
    cores: float = 0.0
    gpu_seconds: float = 0.0
    core_seconds: float = 0.0


def read_folder(store: Store, run: str, now: float) -> Folder:
    """The folder of a run as it is now. :raises Exception: of `UNREADABLE`, if something else than ours lies there."""
    prefix = layout.run_prefix(run)
    began = _moment(store, f"{prefix}began.json")
    known = gangs.kept(store, run)
    if began is None:
        return Folder(queued=_queued(known))
    attempt = _attempt(store, prefix) or began
    live = live_gangs(known, attempt)
    holding = [gang for gang in live if gang.ended is None and gang.started is not None]
    return Folder(
        began=began,
        trained=store.stat(layout.report_key(run)) is not None,
        saved=None if _elsewhere(store, run) else _saved(store, prefix) or attempt,
        gpus=sum(gang.gpus for gang in holding),
        cores=sum(gang.cores for gang in holding),
        gpu_seconds=sum(gang.gpus * gang.seconds(now) for gang in live),
        core_seconds=sum(gang.cores * gang.seconds(now) for gang in live),
    )


def live_gangs(known: Sequence[Gang], attempt: float) -> list[Gang]:
    """The gangs with the start that nobody has written yet of the last one, if its attempt has begun. Pure.

    A gang's start is written down with its end, so of one that runs the attempt's start is the best that is known.
    """
    return [
        Gang(**{**vars(gang), "started": max(attempt, gang.created or 0.0)})
        if gang.ended is None and gang.started is None and attempt >= (gang.created or 0.0) - 1
        else gang
        for gang in known
    ]


def _queued(known: Sequence[Gang]) -> float | None:
    """Since when the pods wait that are to train; those that tokenise before them are not meant."""
    times = [gang.created for gang in known if gang.task == "train" and gang.ended is None and gang.created is not None]
    return max(times, default=None)


def _moment(store: Store, key: str) -> float | None:
    try:
        return float(read_object(store, key)["began"])
    except UNREADABLE:
        return None


def _attempt(store: Store, prefix: str) -> float | None:
    """When the newest attempt began."""
    names = [key.rpartition("/")[2].removesuffix(".json") for key in store.sizes(f"{prefix}attempts/")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return _moment(store, f"{prefix}attempts/{max(numbers)}.json") if numbers else None


def _elsewhere(store: Store, run: str) -> bool:
    """Whether the run's checkpoints lie in a place of their own (`train.checkpoints`), which is not ours to read."""
    try:
        spec = RunSpec.read(store, layout.run_key(run))
    except (MissingObjectError, DropforgeError):
        return False
    return spec.checkpoints_root != spec.root


def _saved(store: Store, prefix: str) -> float | None:
    folder = f"{prefix}checkpoints/"
    found = [int(match[1]) for name in store.folders(folder) if (match := _STEP.fullmatch(name))]
    for step in sorted(found, reverse=True)[:_LOOKS]:
        info = store.stat(f"{folder}step-{step}/manifest.json")  # written last
        if info is not None:
            return info.modified
    return None
