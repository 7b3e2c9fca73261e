"""Which live jobs have nobody left who waits for them: a pure decision over jobs and the states of their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.manifest.ownership import OWNER_LABEL, Owner, label_value

INSTANCE_KEY: Final = "kubeflow-training/instance"
"""Which Airflow a job is of, as label and annotation: another one knows nothing of its tasks."""
FINISHED: Final = frozenset({"success", "failed", "skipped", "removed", "upstream_failed"})
"""States from which no task goes on. A task that is cleared has none of them."""


@dataclass(frozen=True)
class Task:
    """What Airflow says about a task instance.

    :param state: None is a state, too: cleared, or not yet scheduled.
    :param exists: whether Airflow knows it at all.
    :param ended: Unix time of its end, where Airflow tells it.
    """

    state: str | None
    exists: bool = True
    ended: float | None = None

    @property
    def over(self) -> str | None:
        """Why nobody waits for its job; None if somebody does or will."""
        if not self.exists:
            return "Airflow knows no such task instance"
        return f"its task is {self.state}" if self.state in FINISHED else None


GONE: Final = Task(None, exists=False)


class Fate(StrEnum):
    """What becomes of a live job."""

    KEEP = "keep"
    """Its task waits for it, or will."""
    WAIT = "wait"
    """Its task is over, but not for long enough."""
    DELETE = "delete"


@dataclass(frozen=True)
class Orphan:
    """
    :param since: Unix time from which its task is known to be over.
    :param why: one line for the log.
    """

    job: Snapshot
    owner: Owner
    fate: Fate
    since: float
    why: str

    @property
    def name(self) -> str:
        metadata = self.job.job["metadata"]
        return f"{metadata.get('namespace')}/{metadata['name']}"


@dataclass(frozen=True)
class Findings:
    """
    :param kept: live jobs that are left to their tasks.
    :param unclear: live jobs that do not say whose they are, or not in a way that can be relied on: never touched.
    """

    orphans: Sequence[Orphan] = ()
    kept: int = 0
    unclear: int = 0

    def with_fate(self, fate: Fate) -> list[Orphan]:
        return [item for item in self.orphans if item.fate is fate]

    @property
    def seen(self) -> dict[str, float]:
        """Since when which job is an orphan, by uid: for the next look."""
        return {item.job.uid: item.since for item in self.orphans}


@dataclass
class Owned:
    """The live jobs of one Airflow, sorted out before it is asked about anything."""

    jobs: list[tuple[Snapshot, Owner]] = field(default_factory=list)
    unclear: int = 0


def marked(manifest: Mapping[str, Any], instance: str | None) -> dict[str, Any]:
    """The manifest with the Airflow that it is of; without one, no reaper ever touches the job."""
    metadata = dict(manifest.get("metadata") or {})
    if instance:
        metadata["labels"] = {**(metadata.get("labels") or {}), INSTANCE_KEY: label_value(instance)}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), INSTANCE_KEY: instance}
    return {**manifest, "metadata": metadata}


def owned(jobs: Sequence[Snapshot], instance: str) -> Owned:
    """The live jobs that carry this Airflow's mark, its labels and a whole owner; the ended ones are of no interest."""
    found = Owned()
    for job in jobs:
        if _over(job.job):
            continue
        owner = _owner(job, instance)
        if owner is None:
            found.unclear += 1
        else:
            found.jobs.append((job, owner))
    return found


def sort(
    live: Owned, tasks: Mapping[Owner, Task], now: float, grace: float, seen: Mapping[str, float] | None = None
) -> Findings:
    """What becomes of each live job.

    :param tasks: what Airflow says; a job whose task is not among them is kept.
    :param grace: seconds for which a task must have been over. Where Airflow does not tell since when, they begin with
        the first look that found it so.
    :param seen: that first look, by uid; see `Findings.seen`.
    """
    orphans, kept = [], 0
    for job, owner in live.jobs:
        task = tasks.get(owner)
        why = task.over if task else None
        if task is None or why is None:
            kept += 1
            continue
        # A moment that is still to come was noted before the clock was set back.
        known = (seen or {}).get(job.uid, now)
        since = min(now, known if task.ended is None or task.ended > now else task.ended)
        fate = Fate.DELETE if now - since >= grace else Fate.WAIT
        orphans.append(Orphan(job, owner, fate, since, why))
    return Findings(orphans, kept, live.unclear)


def _over(job: Mapping[str, Any]) -> bool:
    """By the job's own word: what has failed for its task, as by a deadline that nobody enforces, may run on."""
    return kind_seen(job).ended(job) or bool((job.get("metadata") or {}).get("deletionTimestamp"))


def _owner(job: Snapshot, instance: str) -> Owner | None:
    labels: Mapping[str, Any] = (job.job.get("metadata") or {}).get("labels") or {}
    owner = Owner.of(job.job)
    if owner is None or job.annotations.get(INSTANCE_KEY) != instance or not instance:
        return None
    # A copied manifest may carry the annotations of another job; the labels must agree with them.
    same = labels.get(OWNER_LABEL) == owner.digest and labels.get(INSTANCE_KEY) == label_value(instance)
    return owner if same else None
