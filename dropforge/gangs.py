"""What the jobs of a run have held, and how long: one object for each gang in the run's folder, over all attempts.

The time of a gang begins with its first container. One whose end nobody has told goes on until it is closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, Final

from dropforge import layout
from dropforge.costs import Hours, Rates, Tariff
from dropforge.json_objects import UnreadableError, read_as, typed
from dropforge.placement.pods import ahead
from dropforge.recipe import Compute
from dropforge.store import Store
from dropforge.text import as_line

MOST: Final = 1000  # jobs of a run over all its tries and clears


@dataclass(frozen=True)
class Gang:
    """A job and its pods; times are Unix times.

    :param task: whose job it is. :param gpus, cores: that its pods hold together.
    :param created: None where the cluster did not tell. :param started: None where no container was seen to start.
    :param reason: why it ended badly, in the words of the job library; empty if it did not, or nobody saw its end.
    :param failed: whether it failed; one that was removed, or stopped at a limit, did not.
    :param step: of a training that failed, the last step of which it was heard; None if of none.
    :param saved: the step of its newest checkpoint then; 0 if it had none, None where nobody could look.
    """

    task: str
    job: str
    uid: str
    number: int
    gpus: float
    cores: float
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    reason: str = ""
    failed: bool = False
    step: int | None = None
    saved: int | None = None

    @property
    def lost_steps(self) -> int | None:
        """Steps that are done again: those of which it told after its newest checkpoint; None if nobody knows."""
        return None if self.step is None or self.saved is None else max(0, self.step - self.saved)

    @property
    def rates(self) -> Rates:
        """What its pods hold."""
        return Rates(self.gpus, self.cores)

    def seconds(self, now: float) -> float:
        """How long it has held its pods' GPUs."""
        if self.started is None:
            return 0.0
        return max(0.0, (now if self.ended is None else self.ended) - self.started)


def rates_of(compute: Compute, task: str, nodes: int | None = None) -> Rates:
    """What the pods of a task's job hold, as `dropforge.job` asks for them.

    :param nodes: of a training that has not all of its nodes.
    """
    nodes = nodes or (compute.nodes if task == "train" else 1)
    if task == "tokenise":
        return Rates(0, ahead(compute)[0])
    return Rates(nodes * compute.gpus, nodes * compute.cpus)


def keep(store: Store, run: str, gang: Gang) -> None:
    """Write down what is known of a gang; a later word takes its place."""
    store.put(layout.gang_key(run, gang.uid), json.dumps(asdict(gang), indent=1).encode())


def _read(values: Mapping[str, Any]) -> Gang:
    """A gang as it was kept. What a newer version has added is passed over: versions meet while one is rolled out."""
    known = {field.name for field in fields(Gang)}
    found = typed(Gang(**{name: value for name, value in values.items() if name in known}))
    return replace(found, reason=as_line(found.reason))  # pods write where it lies


def kept(store: Store, run: str) -> list[Gang]:
    """All gangs of the run, in the order in which they began.

    :raises UnreadableError: if one cannot be read, or there are too many: without it too few hours would be counted.
    """
    mend = "Restore it from the bucket's versions, or delete it: what this job has used is not counted then"
    prefix = layout.gangs_prefix(run)
    keys = [info.key for info in islice(store.list(prefix), MOST + 1)]
    if len(keys) > MOST:  # pods write where they lie
        thing, cause = f"folder {store.uri}/{prefix}", f"it holds more than the {MOST:,} jobs that a run may have"
        raise UnreadableError(thing, cause, "Delete what is of no job, and clear the task")
    found = [read_as(store, key, _read, mend) for key in keys]
    return sorted(found, key=lambda gang: (gang.created or gang.started or 0.0, gang.number))


def why_ended(gangs: Iterable[Gang], task: str) -> str:
    """Why the last gang of a task ended badly; empty if nobody knows, or it did not."""
    return next((gang.reason for gang in reversed(list(gangs)) if gang.task == task), "")


def failed(gangs: Iterable[Gang], task: str) -> list[Gang]:
    """Those of a task that failed."""
    return [gang for gang in gangs if gang.task == task and gang.failed]


def lost_steps(gangs: Iterable[Gang]) -> int | None:
    """Of all of them; None if nobody knows of one."""
    lost = [gang.lost_steps for gang in gangs]
    return None if None in lost else sum(steps or 0 for steps in lost)


def used(gangs: Iterable[Gang], now: float, tariff: Tariff, *, but: str | None = None) -> Hours:
    """What they have used together. :param but: uid of one that does not count."""
    gpu_seconds = core_seconds = 0.0
    for gang in gangs:
        if gang.uid != but:
            gpu_seconds += gang.gpus * gang.seconds(now)
            core_seconds += gang.cores * gang.seconds(now)
    return tariff.hours(gpu_seconds / 3600, core_seconds / 3600)


def closed(gangs: Iterable[Gang], now: float, started: Mapping[str, float | None]) -> list[Gang]:
    """Those whose end nobody has told, with an end.

    :param started: by uid, when the first container of a gang was seen to start; None if none was. What is not known
        at all began with its job: hours may be counted too many, but not too few.
    """
    return [
        replace(gang, started=gang.started or started.get(gang.uid, gang.created), ended=now)
        for gang in gangs
        if gang.ended is None
    ]
