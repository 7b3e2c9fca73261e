"""`JobReaper`: deletes live jobs that their tasks have left behind, because a worker died at the wrong moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol

from kubeflow_training.jobs.backend import Backend, Snapshot
from kubeflow_training.jobs.errors import JobError, JobRefusedError
from kubeflow_training.jobs.manifest.ownership import Owner, label_value
from kubeflow_training.jobs.reaping.orphans import INSTANCE_KEY, Fate, Findings, Orphan, Task, owned, sort

GRACE: Final = timedelta(minutes=5)
EVENT_REASON: Final = "ReapedByAirflow"

log = logging.getLogger(__name__)


class AirflowSilentError(Exception):
    """Airflow does not answer, or not in a way that can be relied on: nothing follows for any task."""


class TaskStates(Protocol):
    """Somebody who can be asked what became of a task."""

    def instance(self) -> str | None:
        """The name of this Airflow, see `kubeflow_training.asking.instance`; None if it has none, and so has no jobs.

        :raises AirflowSilentError: if it does not answer.
        """

    def task(self, owner: Owner) -> Task:
        """:raises AirflowSilentError: if it does not answer."""


@dataclass
class Summary:
    """What one visit of the reaper came to; plain values, for XCom.

    :param deleted: jobs that were deleted: name, uid, owner and why.
    :param waiting: orphans whose grace is not over.
    :param kept: live jobs that their tasks wait for.
    :param unclear: live jobs with this Airflow's mark that do not say whose they are: never touched.
    :param problems: what could not be looked at or deleted.
    """

    deleted: list[dict[str, str]] = field(default_factory=list)
    waiting: list[dict[str, str]] = field(default_factory=list)
    kept: int = 0
    unclear: int = 0
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "deleted": self.deleted,
            "waiting": self.waiting,
            "kept": self.kept,
            "unclear": self.unclear,
            "problems": self.problems,
        }

    def __str__(self) -> str:
        return (
            f"{len(self.deleted)} deleted, {len(self.waiting)} waiting for the end of their grace, "
            f"{self.kept} kept for their tasks, {self.unclear} unclear, {len(self.problems)} problems"
        )


class JobReaper:
    """Compares live jobs with the states of their tasks.

    A job is deleted if it carries the name of this Airflow and the labels of a task instance that is finished or gone
    for longer than the grace. All other jobs are left alone, and if Airflow does not answer, every job is.

    :param backends: makes the backends to look at, each with the name that people know it by.
    :param states: whom to ask about tasks.
    :param namespaces: where to look; None means everywhere, which needs rights for the whole cluster.
    :param grace: how long a task must have been over.
    :param dry_run: say what would be deleted, and delete nothing.
    :param optional: names of backends that may refuse to list: where a kind is unknown or forbidden, none was created.
    """

    def __init__(
        self,
        backends: Mapping[str, Callable[[], Backend]],
        states: TaskStates,
        *,
        namespaces: Sequence[str] | None = None,
        grace: timedelta = GRACE,
        dry_run: bool = False,
        optional: Collection[str] = (),
    ) -> None:
        self.optional = frozenset(optional)
        self.backends, self.states = backends, states
        self.namespaces: Sequence[str | None] = [None] if namespaces is None else list(namespaces)
        self.grace, self.dry_run = grace.total_seconds(), dry_run
        self.seen: dict[str, float] = {}
        """Since when which job is an orphan, by uid; kept from one visit to the next."""

    def visit(self, now: float | None = None) -> Summary:
        """Look at all jobs once, and delete those whose time has come.

        :raises AirflowSilentError: if Airflow does not answer; nothing was deleted then.
        """
        instance = self.states.instance()
        summary = Summary()
        if instance is None:
            log.info("this Airflow has no name yet, so that no job can be its own")
            return summary
        looks = [look for name in self.backends for look in self._look(name, instance, summary)]
        # Airflow is asked about all of them before the first is deleted: silence in the middle deletes nothing.
        live = [(backend, owned(jobs, instance)) for backend, jobs in looks]
        tasks = {owner: self.states.task(owner) for _, mine in live for _, owner in mine.jobs}
        moment = time.time() if now is None else now
        found = [(backend, sort(mine, tasks, moment, self.grace, self.seen)) for backend, mine in live]
        if not live and not summary.problems:
            summary.problems.append(f"none of {', '.join(self.backends)} can be looked at")
        self.seen = {uid: since for _, findings in found for uid, since in findings.seen.items()}
        for backend, findings in found:
            self._act(backend, findings, summary)
        log.info("reaper: %s", summary)
        return summary

    def _look(self, name: str, instance: str, summary: Summary) -> list[tuple[Backend, Sequence[Snapshot]]]:
        """This Airflow's jobs in each namespace; what cannot be looked at is a problem, and no reason to stop."""
        found: list[tuple[Backend, Sequence[Snapshot]]] = []
        try:
            backend = self.backends[name]()
        except (JobError, OSError) as error:
            log.warning("%s cannot be looked at: %s", name, error)
            summary.problems.append(f"{name}: {error}")
            return found
        for namespace in self.namespaces:
            try:
                found.append((backend, backend.jobs(namespace, labels={INSTANCE_KEY: label_value(instance)})))
            except JobError as error:
                if name in self.optional and isinstance(error, JobRefusedError):
                    log.info("%s is left out: %s", name, error)
                    continue
                log.warning("%s cannot be looked at: %s", name, error)
                summary.problems.append(f"{name}: {error}")
        return found

    def _act(self, backend: Backend, findings: Findings, summary: Summary) -> None:
        summary.kept += findings.kept
        summary.unclear += findings.unclear
        for orphan in findings.with_fate(Fate.WAIT):
            log.info("job %s is orphaned: %s. It is deleted when its grace is over", orphan.name, orphan.why)
            summary.waiting.append(_told(orphan))
        for orphan in findings.with_fate(Fate.DELETE):
            if self.dry_run:
                log.info("job %s would be deleted: %s", orphan.name, orphan.why)
                summary.deleted.append(_told(orphan))
                continue
            metadata = orphan.job.job["metadata"]
            text = f"deleted because {orphan.why} ({orphan.owner}) and no task waits for it"
            try:
                tell(backend, orphan, text)
                if backend.delete(metadata["name"], metadata["namespace"], uid=orphan.job.uid):
                    log.warning("job %s (uid %s) is %s", orphan.name, orphan.job.uid, text)
                    summary.deleted.append(_told(orphan))
            except JobError as error:
                log.error("job %s could not be deleted and may still run: %s", orphan.name, error)
                summary.problems.append(f"{orphan.name}: {error}")


def tell(backend: Backend, orphan: Orphan, text: str) -> None:
    """An event about the job where its cluster keeps events; without the right to it, the log has to do."""
    say = getattr(backend, "say", None)
    if say is None:
        return
    try:
        say(orphan.job, EVENT_REASON, f"The job is {text}")
    except JobError as error:
        log.info("no event could be written about job %s: %s", orphan.name, error)


def _told(orphan: Orphan) -> dict[str, str]:
    return {"job": orphan.name, "uid": orphan.job.uid, "owner": str(orphan.owner), "why": orphan.why}
