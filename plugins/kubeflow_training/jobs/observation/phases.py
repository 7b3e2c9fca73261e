"""What an observation of a job is: its phase, the reason, and who failed first. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from kubeflow_training.jobs.observation.progress import Progress
from kubeflow_training.jobs.observation.reasons import MENDS, RETRYABLE, Reason
from kubeflow_training.jobs.shapes import moment, storable


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


TAKEN: Final = frozenset({Reason.NODE_LOST, Reason.PREEMPTED, Reason.EVICTED})
"""That the cluster, or a person, took a pod away."""
_ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.LOST})


@dataclass(frozen=True)
class Observation:
    """
    :param reason: why it failed, or why it waits; None while all is well.
    :param failing_rank: global rank that failed first, else the node rank of its pod; `replica` is like `worker-0`.
    :param pod, node, exit_code: of that first failure.
    :param message: one line for a person.
    :param started, finished: when the first container started and the job ended. :param placed: when the pod of that
        container got its node; from then on its image was pulled.
    :param pods_placed, unplaced_since: how many pods have a node, and since when the first of the others wants one.
    :param held_since: when it was last suspended, or let go after that: what it waits now begins there.
    :param queue, position: the queue that holds the job back, and its place there, from 1; None if there is none.
    :param victims: how many other pods ended badly after the first failure.
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
    placed: datetime | None = None
    pods_running: int = 0
    pods_wanted: int = 0
    pods_placed: int = 0
    unplaced_since: datetime | None = None
    held_since: datetime | None = None
    queue: str | None = None
    position: int | None = None
    victims: int = 0

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
        """Plain values, for XCom, trigger events and JSON; of what containers said, what a database takes."""
        found: dict[str, Any] = {
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
            "placed": self.placed.isoformat() if self.placed else None,
            "pods_running": self.pods_running,
            "pods_wanted": self.pods_wanted,
            "pods_placed": self.pods_placed,
            "unplaced_since": self.unplaced_since.isoformat() if self.unplaced_since else None,
            "held_since": self.held_since.isoformat() if self.held_since else None,
            "queue": self.queue,
            "position": self.position,
            "victims": self.victims,
        }
        return {key: storable(value) for key, value in found.items()}

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
                "placed": moment(data.get("placed")),
                "unplaced_since": moment(data.get("unplaced_since")),
                "held_since": moment(data.get("held_since")),
            }
        )


def told_best(first: Observation, later: Observation) -> Observation:
    """Of two looks at a job that has failed, the one that says why: its pods may be gone at the second."""
    vague = later.reason in (None, Reason.UNKNOWN, Reason.KILLED) or (
        later.pod is None and later.reason is first.reason
    )
    # Of pods that are gone all are removed from outside; who took them was told while they were there.
    vague = vague or (later.pod is None and later.reason is Reason.EVICTED and first.reason in TAKEN)
    if not (first.phase is later.phase is Phase.FAILED and vague and first.reason not in (None, Reason.UNKNOWN)):
        return later
    return replace(
        first,
        finished=later.finished or first.finished,
        progress=later.progress or first.progress,
        pods_running=later.pods_running,
        pods_placed=later.pods_placed,
    )
