"""Watching one job: read, observe, collect new log lines. The same for operator, trigger and command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kubeflow_training.jobs.backend import Backend, Position, Snapshot
from kubeflow_training.jobs.errors import BackendUnauthorizedError, BackendUnavailableError, JobError
from kubeflow_training.jobs.manifest import REPLICA_INDEX_LABEL, REPLICA_TYPE_LABEL
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.progress import Progress, parse
from kubeflow_training.jobs.reasons import items, mapping

LogRanks = Literal["all", "first", "none"]
_CHUNKS: Final = 50  # per pod and step, so that one talkative rank does not hold up the rest


@dataclass(frozen=True)
class Step:
    """What one look brought.

    :param observation: the job's state, or None if the backend could not be asked.
    :param lines: new lines for the log: of the ranks, with their prefix, and about the job itself.
    :param final: the job has ended and all of its log has been read.
    """

    observation: Observation | None
    lines: list[str] = field(default_factory=list)
    final: bool = False


class Watch:
    """
    :param connect: makes a backend; called again after the credentials ran out.
    :param uid: only the job that has it is ours; another one of the same name means that ours is gone.
    :param positions: where the log of each pod was left by an earlier watch.
    :param must_exist: whether a job that was never seen counts as lost, or is waited for.
    :param settle_seconds: how long to wait, after the first failure, for the other pods' ends and last lines.
    """

    def __init__(
        self,
        connect: Callable[[], Backend],
        name: str,
        namespace: str,
        *,
        uid: str | None = None,
        ranks: LogRanks = "all",
        positions: Mapping[str, Position] | None = None,
        progress: Progress | None = None,
        must_exist: bool = True,
        settle_seconds: float = 15.0,
    ) -> None:
        self._connect, self._backend = connect, connect()
        self.name, self.namespace, self.uid, self.ranks = name, namespace, uid, ranks
        self.positions: dict[str, Position] = dict(positions or {})
        self.progress = progress
        self.snapshot: Snapshot | None = None
        self._must_exist, self._settle = must_exist, settle_seconds
        self._ended_at: float | None = None
        self._said: tuple[Phase, str] | None = None
        self._trouble = 0

    @property
    def backend(self) -> Backend:
        return self._backend

    def step(self) -> Step:
        """Look once. Never raises for a backend that cannot be reached: that says nothing about the job."""
        try:
            return self._look()
        except BackendUnauthorizedError as error:
            self._backend = self._connect()
            return Step(None, self._complain(error))
        except BackendUnavailableError as error:
            return Step(None, self._complain(error))

    def _look(self) -> Step:
        snapshot = self._backend.read(self.name, self.namespace)
        if snapshot is not None and self.uid not in (None, snapshot.uid):
            snapshot = None
        if snapshot is None and self.snapshot is None and not self._must_exist:
            return Step(None, self._say(Phase.QUEUED, "The job does not exist yet"))
        lines: list[str] = []
        caught_up = True
        if snapshot is not None:
            self.snapshot = snapshot
            lines, caught_up = self._read_logs(snapshot)
        observation = observe(
            snapshot.job if snapshot else None,
            snapshot.pods if snapshot else (),
            snapshot.events if snapshot else (),
            self.progress,
        )
        self._trouble = 0
        lines += self._say(observation.phase, observation.message)
        return Step(observation, lines, observation.ended and caught_up and self._settled(observation))

    def _settled(self, observation: Observation) -> bool:
        """Whether an ended job has nothing more to tell: the rank that failed first may be the last to say so."""
        if self._ended_at is None:
            # One more look reads what the ranks wrote between their log's end and the job's.
            self._ended_at = time.monotonic()
            return observation.phase is Phase.LOST
        if observation.phase is not Phase.FAILED or not observation.pods_running:
            return True
        return time.monotonic() - self._ended_at > self._settle

    def _read_logs(self, snapshot: Snapshot) -> tuple[list[str], bool]:
        lines: list[str] = []
        caught_up = True
        if self.ranks == "none":
            return lines, caught_up
        for pod in snapshot.pods:
            name = str(mapping(pod.get("metadata")).get("name"))
            if not has_log(pod):
                continue
            if self.ranks == "first" and replica(pod) != "master-0":
                continue
            for _ in range(_CHUNKS):
                chunk = self._backend.logs(pod, self.positions.get(name))
                if chunk.position is not None:
                    self.positions[name] = chunk.position
                for line in chunk.lines:
                    self.progress = parse(line) or self.progress
                    lines.append(f"[{replica(pod)}] {line}")
                if not chunk.lines:
                    break
            else:
                caught_up = False
        return lines, caught_up

    def _say(self, phase: Phase, message: str) -> list[str]:
        if self._said == (phase, message):
            return []
        self._said = (phase, message)
        return [f"job {self.namespace}/{self.name} is {phase}: {message}"]

    def _complain(self, error: JobError) -> list[str]:
        """Say so the first time, and then ever more rarely."""
        self._trouble += 1
        rare = self._trouble & (self._trouble - 1) == 0
        return [f"cannot ask about job {self.namespace}/{self.name}, and go on trying: {error}"] if rare else []


def replica(pod: Mapping[str, Any]) -> str:
    """The pod's place in the gang, like `worker-0`."""
    labels = mapping(mapping(pod.get("metadata")).get("labels"))
    kind, index = labels.get(REPLICA_TYPE_LABEL), labels.get(REPLICA_INDEX_LABEL, "0")
    return f"{str(kind).lower()}-{index}" if kind else str(mapping(pod.get("metadata")).get("name"))


def has_log(pod: Mapping[str, Any]) -> bool:
    """Whether a container of the pod has begun."""
    return any(
        mapping(container.get("state")).keys() & {"running", "terminated"}
        for container in items(mapping(pod.get("status")).get("containerStatuses"))
    )


def last_lines(backend: Backend, snapshot: Snapshot | None, pod_name: str | None, lines: int = 20) -> list[str]:
    """The last lines of one pod's log; none if they cannot be had."""
    for pod in snapshot.pods if snapshot else ():
        if mapping(pod.get("metadata")).get("name") == pod_name:
            try:
                return backend.tail(pod, lines)
            except JobError:
                return []
    return []
