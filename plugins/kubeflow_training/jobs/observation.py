"""The one reader of a job's state: `observe` turns job, pods and events into an `Observation`.

Pure; it never raises and always has a phase. Operator, sensor, trigger, pages and command line all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from kubeflow_training.jobs.progress import Progress
from kubeflow_training.jobs.reasons import MENDS, RETRYABLE, Ending, Reason, ending, first, items, mapping, moment

__all__ = ["Observation", "Phase", "Reason", "observe"]


class Phase(StrEnum):
    """Where a job is on its way."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.LOST})
# Waiting reasons that never mend themselves while the pod waits. A single ErrImagePull is not among them.
_HOPELESS: Final = {
    "ImagePullBackOff": Reason.IMAGE,
    "InvalidImageName": Reason.IMAGE,
    "ErrImageNeverPull": Reason.IMAGE,
    "CreateContainerConfigError": Reason.USER_ERROR,
    "CreateContainerError": Reason.USER_ERROR,
    "RunContainerError": Reason.USER_ERROR,
}


@dataclass(frozen=True)
class Observation:
    """
    :param reason: why it failed, or why it waits; None while all is well.
    :param failing_rank: global rank that failed first, else the node rank of its pod; `replica` is like `worker-0`.
    :param pod, node, exit_code: of that first failure.
    :param message: one line for a person.
    :param started, finished: when the first container started and the job ended.
    """

    phase: Phase
    reason: Reason | None = None
    message: str = ""
    failing_rank: int | None = None
    replica: str | None = None
    pod: str | None = None
    node: str | None = None
    exit_code: int | None = None
    progress: Progress | None = None
    started: datetime | None = None
    finished: datetime | None = None
    pods_running: int = 0
    pods_wanted: int = 0

    @property
    def ended(self) -> bool:
        return self.phase.ended

    @property
    def retryable(self) -> bool:
        """Whether a new gang may end better."""
        return self.phase is not Phase.SUCCEEDED and RETRYABLE[self.reason or Reason.UNKNOWN]

    @property
    def mend(self) -> str:
        return MENDS[self.reason] if self.reason else ""

    @property
    def seconds(self) -> float | None:
        """Running time of the ended job."""
        return (self.finished - self.started).total_seconds() if self.started and self.finished else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for XCom, trigger events and JSON."""
        return {
            "phase": str(self.phase),
            "reason": str(self.reason) if self.reason else None,
            "message": self.message,
            "failing_rank": self.failing_rank,
            "replica": self.replica,
            "pod": self.pod,
            "node": self.node,
            "exit_code": self.exit_code,
            "progress": self.progress.to_dict() if self.progress else None,
            "started": self.started.isoformat() if self.started else None,
            "finished": self.finished.isoformat() if self.finished else None,
            "pods_running": self.pods_running,
            "pods_wanted": self.pods_wanted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of `to_dict`.

        :raises ValueError: if the phase or the reason is none.
        """
        return cls(
            **{
                **data,
                "phase": Phase(data["phase"]),
                "reason": Reason(data["reason"]) if data.get("reason") else None,
                "progress": Progress.from_dict(data.get("progress")),
                "started": moment(data.get("started")),
                "finished": moment(data.get("finished")),
            }
        )


def observe(
    job: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]] = (),
    events: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> Observation:
    """What the job is doing, from the PyTorchJob, its pods and events as the API tells them; None if it is gone."""
    if job is None:
        return Observation(Phase.LOST, Reason.DELETED, "The job no longer exists and left no result", progress=progress)
    seen = _Seen(mapping(job), items(list(pods)), items(list(events)), progress)
    return (
        _observe_end(seen)
        or _observe_pause(seen)
        or _observe_failing_pods(seen)
        or _observe_waiting(seen)
        or _observe_pods(seen)
    )


class _Seen:
    """The material of one observation, with what several steps need."""

    def __init__(
        self,
        job: Mapping[str, Any],
        pods: list[Mapping[str, Any]],
        events: list[Mapping[str, Any]],
        progress: Progress | None,
    ) -> None:
        self.job, self.pods, self.events, self.progress = job, pods, events, progress
        self.metadata, self.spec, status = (mapping(job.get(key)) for key in ("metadata", "spec", "status"))
        self.status = status
        # The last condition is not the state: only those that are true count, whatever their order.
        self.conditions = {str(c.get("type")): c for c in items(status.get("conditions")) if c.get("status") == "True"}
        self.endings = [found for pod in pods if (found := ending(pod))]
        self.wanted = sum(_replicas(item) for item in mapping(self.spec.get("pytorchReplicaSpecs")).values()) or len(
            pods
        )
        self.started = min((start for pod in pods if (start := _started(pod))), default=None) or moment(
            status.get("startTime")
        )
        self.running = sum(1 for pod in pods if mapping(pod.get("status")).get("phase") == "Running")

    def observation(self, phase: Phase, message: str, reason: Reason | None = None, **more: Any) -> Observation:
        return Observation(
            phase,
            reason,
            message,
            progress=self.progress,
            started=self.started,
            pods_running=self.running,
            pods_wanted=self.wanted,
            **more,
        )

    def failure(self, cause: Ending | None, fallback: str, reason: Reason | None = None) -> Observation:
        finished = moment(self.status.get("completionTime")) or (cause.when if cause else None)
        if cause is None:
            return self.observation(Phase.FAILED, fallback, reason or Reason.UNKNOWN, finished=finished)
        where = f" on {cause.node}" if cause.node else ""
        code = f" with exit code {cause.exit_code}" if cause.exit_code is not None else ""
        last = f": {cause.message.splitlines()[-1][:500]}" if cause.message else ""
        rank = cause.rank if cause.rank is not None else cause.index
        return self.observation(
            Phase.FAILED,
            f"rank {rank} ({cause.replica}) failed first{where}{code}{last}",
            reason or cause.reason,
            failing_rank=rank,
            replica=cause.replica,
            pod=cause.pod,
            node=cause.node,
            exit_code=cause.exit_code,
            finished=finished,
        )


def _observe_end(seen: _Seen) -> Observation | None:
    if failed := seen.conditions.get("Failed"):
        text = f"{failed.get('reason') or ''} {failed.get('message') or ''}"
        lower = text.lower()
        reason = None
        if "deadline" in lower:
            reason = Reason.DEADLINE
        elif str(failed.get("reason")) == "NeverFits":
            reason = Reason.QUOTA
        cause = None if reason else first(seen.endings)
        return seen.failure(cause, str(failed.get("message") or text.strip() or "The job failed"), reason)
    if succeeded := seen.conditions.get("Succeeded"):
        finished = moment(seen.status.get("completionTime")) or moment(succeeded.get("lastTransitionTime"))
        return seen.observation(Phase.SUCCEEDED, "All is done", finished=finished)
    if seen.metadata.get("deletionTimestamp"):
        return seen.observation(Phase.CANCELLED, "The job is being deleted", Reason.DELETED)
    return None


def _observe_pause(seen: _Seen) -> Observation | None:
    if mapping(seen.spec.get("runPolicy")).get("suspend") is True or "Suspended" in seen.conditions:
        message = str(mapping(seen.conditions.get("Suspended")).get("message") or "")
        return seen.observation(Phase.QUEUED, message or "The job is suspended until its queue admits it")
    return None


def _observe_failing_pods(seen: _Seen) -> Observation | None:
    """A failed pod ends a gang that never restarts, even before the job's own condition says so."""
    if not seen.endings:
        return None
    if any(_kind(pod) == "master" and mapping(pod.get("status")).get("phase") == "Succeeded" for pod in seen.pods):
        return None  # the master's success is the job's success
    policies = {
        str(mapping(item).get("restartPolicy")) for item in mapping(seen.spec.get("pytorchReplicaSpecs")).values()
    }
    if policies and policies <= {"Never"}:
        return seen.failure(first(seen.endings), "A pod failed")
    cause = first(seen.endings)
    return seen.observation(Phase.RESTARTING, f"{cause.pod} failed and is started again" if cause else "A pod failed")


def _observe_waiting(seen: _Seen) -> Observation | None:
    """Containers that wait for what will not come, and pods that a quota keeps away."""
    for pod in seen.pods:
        for container in items(mapping(pod.get("status")).get("containerStatuses")):
            waiting = mapping(mapping(container.get("state")).get("waiting"))
            name, text = str(waiting.get("reason") or ""), str(waiting.get("message") or "").strip()
            where = str(mapping(pod.get("metadata")).get("name") or "a pod")
            if reason := _HOPELESS.get(name):
                replica = f"{_kind(pod)}-{_index(pod)}"
                return seen.observation(Phase.FAILED, f"{where}: {name}: {text}", reason, pod=where, replica=replica)
            if name == "ErrImagePull":
                return seen.observation(Phase.STARTING, f"{where}: {name}: {text}", Reason.IMAGE)
    if len(seen.pods) < seen.wanted:
        for event in reversed(seen.events):
            text = str(event.get("message") or "")
            if event.get("type") == "Warning" and "exceeded quota" in text:
                return seen.observation(Phase.QUEUED, text, Reason.QUOTA)
    return None


def _observe_pods(seen: _Seen) -> Observation:
    phases = [mapping(pod.get("status")).get("phase") for pod in seen.pods]
    if "Restarting" in seen.conditions:
        return seen.observation(Phase.RESTARTING, "Pods are started again")
    if not seen.pods:
        if "Running" in seen.conditions:
            return seen.observation(Phase.RESTARTING, "The pods are gone; new ones are awaited")
        return seen.observation(Phase.QUEUED, _warning(seen) or "The job waits for its pods")
    done = sum(1 for phase in phases if phase == "Succeeded")
    if "Unknown" in phases:
        lost = [
            str(mapping(p.get("metadata")).get("name"))
            for p, phase in zip(seen.pods, phases, strict=True)
            if phase == "Unknown"
        ]
        return seen.observation(Phase.RUNNING, f"The node of {', '.join(lost)} does not answer", Reason.NODE_LOST)
    if seen.running + done >= max(seen.wanted, 1):
        return seen.observation(Phase.RUNNING, f"{seen.running} of {seen.wanted} pods run")
    waits = [text for pod in seen.pods if (text := _unscheduled(pod)) is not None]
    if len(waits) == len(seen.pods):
        return seen.observation(Phase.QUEUED, next((text for text in waits if text), "The pods wait for a node"))
    more = next((text for text in waits if text), "")
    return seen.observation(Phase.STARTING, f"{seen.running} of {seen.wanted} pods run" + (f"; {more}" if more else ""))


def _unscheduled(pod: Mapping[str, Any]) -> str | None:
    """Why the pod has no node yet ("" if nobody says), or None if it has one."""
    status = mapping(pod.get("status"))
    if status.get("phase") not in (None, "Pending") or mapping(pod.get("spec")).get("nodeName"):
        return None
    for condition in items(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "")
    return ""


def _warning(seen: _Seen) -> str:
    return next((str(e.get("message") or "") for e in reversed(seen.events) if e.get("type") == "Warning"), "")


def _started(pod: Mapping[str, Any]) -> datetime | None:
    for container in items(mapping(pod.get("status")).get("containerStatuses")):
        state = mapping(container.get("state"))
        found = moment(
            mapping(state.get("running")).get("startedAt") or mapping(state.get("terminated")).get("startedAt")
        )
        if found:
            return found
    return None


def _kind(pod: Mapping[str, Any]) -> str:
    return str(
        mapping(mapping(pod.get("metadata")).get("labels")).get("training.kubeflow.org/replica-type") or ""
    ).lower()


def _index(pod: Mapping[str, Any]) -> str:
    return str(mapping(mapping(pod.get("metadata")).get("labels")).get("training.kubeflow.org/replica-index") or "0")


def _replicas(replica: Any) -> int:
    count = mapping(replica).get("replicas", 1)
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1
