"""Why a job ended badly: the reasons, what follows from each, and the table that finds them in a pod."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from kubeflow_training.jobs.kinds import PYTORCH_JOB, Kind
from kubeflow_training.jobs.observation.torchrun import root_cause
from kubeflow_training.jobs.shapes import items as items
from kubeflow_training.jobs.shapes import mapping as mapping
from kubeflow_training.jobs.shapes import moment as moment
from kubeflow_training.jobs.shapes import name as name_of
from kubeflow_training.jobs.shapes import text, whole


class Reason(StrEnum):
    """Why a job ended badly, or why it waits."""

    USER_ERROR = "user error"
    BAD_DATA = "bad data"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    NODE_LOST = "node lost"
    IMAGE = "image"
    QUOTA = "quota"
    UNSCHEDULABLE = "unschedulable"
    TOO_FEW_NODES = "too few nodes"
    KILLED = "killed"
    COLLECTIVE_TIMEOUT = "collective timeout"
    DEADLINE = "deadline"
    IDLE = "idle GPUs"
    DELETED = "deleted"
    UNKNOWN = "unknown"


RETRYABLE: Final = {
    Reason.USER_ERROR: False,
    Reason.BAD_DATA: False,
    Reason.OUT_OF_MEMORY: False,
    Reason.PREEMPTED: True,
    Reason.EVICTED: True,
    Reason.NODE_LOST: True,
    Reason.IMAGE: False,
    Reason.QUOTA: False,
    Reason.UNSCHEDULABLE: False,
    Reason.TOO_FEW_NODES: True,
    Reason.KILLED: True,
    Reason.COLLECTIVE_TIMEOUT: True,
    Reason.DEADLINE: False,
    Reason.IDLE: False,
    Reason.DELETED: False,
    Reason.UNKNOWN: True,
}
"""Whether a new gang of the same job may end better."""

MENDS: Final = {
    Reason.USER_ERROR: "Correct the job's command, code or settings; trying again as it is changes nothing",
    Reason.BAD_DATA: "Correct the data; trying again as it is changes nothing",
    Reason.OUT_OF_MEMORY: "Ask for more memory per pod, or make the batch or the model smaller",
    Reason.PREEMPTED: "It is tried again and resumes from the newest complete checkpoint",
    Reason.EVICTED: "It is tried again; if it comes back, ask for as much memory and disk as the job uses",
    Reason.NODE_LOST: "It is tried again on what nodes there are; look at the node if it comes back",
    Reason.IMAGE: "Correct the image's name, or name a registry's login in `image_pull_secrets`",
    Reason.QUOTA: "Ask for less, or have the namespace's quota raised",
    Reason.UNSCHEDULABLE: "Ask for what a node has free, or correct node selector and tolerations",
    Reason.TOO_FEW_NODES: "The next attempt starts with the nodes there are; if it comes back, ask for fewer",
    Reason.KILLED: "It is tried again; if it comes back, ask for more memory per pod, the likeliest cause",
    Reason.COLLECTIVE_TIMEOUT: "It is tried again; if it comes back, look at the nodes' network and GPUs",
    Reason.DEADLINE: "Give the job more time (deadline_seconds), or less to do",
    Reason.IDLE: "See what its GPUs waited for (data, network, a rank); a cleared task resumes where it saved",
    Reason.DELETED: "The job was removed from outside; clear the task to start it again",
    Reason.UNKNOWN: "Read the last lines of the failing rank; it is tried again as long as there are tries left",
}

# The exit codes of a training container, and what shells and kernels add. Anything else is unknown.
EXIT_CODES: Final = {
    10: Reason.USER_ERROR,
    11: Reason.BAD_DATA,
    12: Reason.USER_ERROR,
    13: Reason.IDLE,
    20: Reason.PREEMPTED,
    21: Reason.COLLECTIVE_TIMEOUT,
    22: Reason.NODE_LOST,
    126: Reason.USER_ERROR,
    127: Reason.USER_ERROR,
    128: Reason.USER_ERROR,
    137: Reason.KILLED,
    143: Reason.PREEMPTED,
}
_POD_REASONS: Final = {
    "Evicted": Reason.EVICTED,
    "Preempted": Reason.PREEMPTED,
    "Preempting": Reason.PREEMPTED,
    "Terminated": Reason.PREEMPTED,  # graceful node shutdown
    "NodeShutdown": Reason.PREEMPTED,
    "Shutdown": Reason.PREEMPTED,
    "NodeLost": Reason.NODE_LOST,
    "NodeAffinity": Reason.USER_ERROR,
    "DeadlineExceeded": Reason.DEADLINE,
}
_DISRUPTIONS: Final = {
    "PreemptionByScheduler": Reason.PREEMPTED,
    "PreemptionByKubeScheduler": Reason.PREEMPTED,
    "TerminationByKubelet": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "DeletionByTaintManager": Reason.NODE_LOST,
    "DeletionByPodGC": Reason.NODE_LOST,
}
_CONTAINER_REASONS: Final = {
    "OOMKilled": Reason.OUT_OF_MEMORY,
    "ContainerCannotRun": Reason.USER_ERROR,
    "StartError": Reason.USER_ERROR,
    "ContainerStatusUnknown": Reason.NODE_LOST,
}
_TEXTS: Final = (
    (
        re.compile(r"uncorrectable ECC|GPU has fallen off the bus|GPU is lost|CUDA error: unspecified launch", re.I),
        Reason.NODE_LOST,
    ),
    (
        re.compile(r"out of memory|OutOfMemoryError|\bMemoryError\b|Cannot allocate memory|std::bad_alloc", re.I),
        Reason.OUT_OF_MEMORY,
    ),
    (
        re.compile(
            r"Watchdog caught collective|NCCL (error|timeout)|nccl(System|Remote|Internal)Error"
            r"|Dist(Backend|Network)Error|Connection closed by peer|gloo.{0,200}(timed? ?out|reset by peer)"
            r"|failed to recv, got 0 bytes|Rendezvous(Timeout|Connection|Closed)Error|client socket has timed out",
            re.I | re.S,
        ),
        Reason.COLLECTIVE_TIMEOUT,
    ),
)
_SPEAKING_CODES: Final = frozenset({10, 11, 12, 13, 20, 21, 22})


@dataclass(frozen=True)
class Ending:
    """How one pod ended badly.

    :param replica: like `worker-0`; `index` is the node rank, the master being 0.
    :param rank: the global rank, where the pod's termination message tells it.
    :param when: end of its container; None if unknown.
    :param message: the container's own last words.
    :param taken: whether the cluster took the pod away.
    :param init_container: name of the init container that failed before training began; None if it began.
    """

    pod: str
    replica: str
    index: int
    rank: int | None
    exit_code: int | None
    node: str | None
    reason: Reason
    when: datetime | None
    message: str
    init_container: str | None = None
    taken: bool = False

    @property
    def victim(self) -> bool:
        """Whether this looks like what a peer's death does: a broken collective, a SIGTERM, or the SIGKILL after it."""
        return not self.taken and (self.reason in (Reason.COLLECTIVE_TIMEOUT, Reason.KILLED) or self._told_to_end)

    @property
    def _told_to_end(self) -> bool:
        return self.exit_code == 143 and self.reason in (Reason.UNKNOWN, Reason.PREEMPTED)


def ending(pod: Mapping[str, Any], kind: Kind = PYTORCH_JOB, job: Mapping[str, Any] | None = None) -> Ending | None:
    """How the pod ended badly, or None if it did not."""
    status = mapping(pod.get("status"))
    container, terminated = _terminated(status, kind.training_container(pod))
    code = terminated.get("exitCode")
    code = code if isinstance(code, int) and not isinstance(code, bool) else None
    if code in (None, 0) and status.get("phase") != "Failed":
        return None
    told = _told(terminated.get("message"))
    said = whole(told.get("exit_code"))
    # torchrun ends with 1 whatever a rank ended with; the termination message has the rank's own code.
    if code in (None, 1) and said:
        code = said
    taken = disruption(pod)
    # Of a pod that was taken away the cluster says more than the last line of its log.
    words = (
        (status.get("message"), terminated.get("message"))
        if taken
        else (terminated.get("message"), status.get("message"))
    )
    message = str(told.get("message") or words[0] or words[1] or "").strip()
    return Ending(
        pod=name_of(pod),
        replica=kind.replica(pod),
        index=kind.node_rank(pod, job),
        rank=whole(told.get("rank")),
        exit_code=code,
        node=text(mapping(pod.get("spec")).get("nodeName")),
        reason=taken or _reason(status, terminated, code, message, text(told.get("signal"))),
        when=moment(terminated.get("finishedAt")),
        message=message[-4000:],
        init_container=container,
        taken=taken is not None,
    )


def disruption(pod: Mapping[str, Any]) -> Reason | None:
    """Why the cluster takes or took the pod away from its node, if it does."""
    status = mapping(pod.get("status"))
    if found := _POD_REASONS.get(str(status.get("reason"))):
        return found
    for condition in items(status.get("conditions")):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return _DISRUPTIONS.get(str(condition.get("reason")), Reason.PREEMPTED)
    return None


def first(endings: list[Ending]) -> Ending | None:
    """The root cause: the earliest ending that is not what a peer's death does, else the earliest of all."""
    late = datetime.max.replace(tzinfo=UTC)
    # Kubernetes tells whole seconds; among equals a SIGKILL explains a broken collective, which explains a SIGTERM.
    order = {21: 1, 143: 3}
    # A pod that ends itself, its GPUs being idle, has its peers save and end as for a preemption, maybe before it.
    idle = [item for item in endings if item.reason is Reason.IDLE]
    causes = idle or [item for item in endings if not item.victim] or endings

    def place(item: Ending) -> int:
        return 0 if item.exit_code == 137 or item.reason is Reason.KILLED else order.get(item.exit_code or 0, 2)

    return min(causes, key=lambda item: (item.when or late, place(item), item.index), default=None)


def _reason(
    status: Mapping[str, Any], terminated: Mapping[str, Any], code: int | None, message: str, signal: str | None
) -> Reason:
    if found := _CONTAINER_REASONS.get(str(terminated.get("reason"))):
        return found
    if code == 21 and signal == "SIGKILL":  # of a rank, whose launcher lived to say so
        return Reason.KILLED
    if code in _SPEAKING_CODES:
        return EXIT_CODES[code]
    for pattern, reason in _TEXTS:
        if pattern.search(message):
            return reason
    if code is None and status.get("phase") == "Failed" and not terminated:
        return Reason.NODE_LOST if status.get("reason") else Reason.UNKNOWN
    return EXIT_CODES.get(code or 0, Reason.UNKNOWN)


def _terminated(status: Mapping[str, Any], training: str) -> tuple[str | None, Mapping[str, Any]]:
    """How the training container ended; a failed init container counts, by name, if that one never ran."""
    for container in items(status.get("containerStatuses")):
        terminated = mapping(mapping(container.get("state")).get("terminated"))
        if terminated and container.get("name") == training:
            return None, terminated
    for container in items(status.get("initContainerStatuses")):
        terminated = mapping(mapping(container.get("state")).get("terminated"))
        if terminated and terminated.get("exitCode") != 0:
            return str(container.get("name")), terminated
    return None, {}


def _told(message: Any) -> Mapping[str, Any]:
    """The termination message, if it is JSON; the kubelet may put log lines in its place, which may be torchrun's."""
    if not isinstance(message, str):
        return {}
    if not message.lstrip().startswith("{"):
        return root_cause(message)
    try:
        return mapping(json.loads(message))
    except (ValueError, RecursionError):
        return {}
