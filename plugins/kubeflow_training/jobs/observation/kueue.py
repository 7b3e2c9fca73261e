"""What Kueue's Workload says about a job that waits in a queue. Pure; how to ask for it, and how to read the answer.

The Workload travels among the events of a `Snapshot`, with what `with_position` put into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.shapes import items, labels, mapping, name, whole

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
GROUP: Final = "kueue.x-k8s.io"
VISIBILITY_GROUP: Final = "visibility.kueue.x-k8s.io"
VERSIONS: Final = ("v1beta2", "v1beta1")
"""Of both groups, the newest first; an older Kueue has only the last."""
_POSITION: Final = "kubeflow-training/position"
_OTHERS: Final = "kubeflow-training/others-before"
_DEACTIVATED: Final = "Deactivated"
"""Why Kueue evicts what a person has set inactive, and says so for ever; other reasons of its own begin like it."""


@dataclass(frozen=True)
class Queued:
    """
    :param reason: why it waits, if there is more to it than its turn.
    :param position: 1 is the next of the queue; None if nobody tells.
    """

    queue: str
    reason: Reason | None
    message: str
    position: int | None = None


def worth_asking(job: Mapping[str, Any]) -> bool:
    """Whether a Workload can say something about the job: it has a queue and is held back."""
    kind = kind_seen(job)
    return bool(queue_of(job)) and kind.suspended(job) and not kind.ended(job)


def queue_of(job: Mapping[str, Any]) -> str | None:
    """Name of the job's local queue."""
    return str(labels(job).get(QUEUE_LABEL) or "") or None


def selector(job: Mapping[str, Any]) -> str:
    """Label selector of the job's Workload."""
    return f"{GROUP}/job-uid={mapping(job.get('metadata')).get('uid')}"


def workload_in(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The Workload among the events of a snapshot."""
    return next((item for item in reversed(events) if item.get("kind") == "Workload"), None)


def newest(answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of a list of a job's Workloads the one that counts."""
    found = items(mapping(answer).get("items"))
    return max(found, key=lambda item: str(mapping(item.get("metadata")).get("creationTimestamp") or ""), default=None)


def admitted(workload: Mapping[str, Any]) -> bool:
    """Whether its job may begin."""
    return "Admitted" in _conditions(workload)


def pending(workload: Mapping[str, Any]) -> bool:
    """Whether it waits for quota, so that it has a position."""
    return "QuotaReserved" not in _conditions(workload)


def with_position(workload: Mapping[str, Any], answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Workload with its position.

    :param answer: `localqueues/QUEUE/pendingworkloads` of the visibility API; None if it cannot be had.
    """
    found = (item for item in items(mapping(answer).get("items")) if name(item) == name(workload))
    told = mapping(next(found, None))
    position, among_all = whole(told.get("positionInLocalQueue")), whole(told.get("positionInClusterQueue"))
    others = None if position is None or among_all is None else among_all - position
    more = {"kind": "Workload", _POSITION: position, _OTHERS: others}
    return {**workload, "apiVersion": f"{GROUP}/{VERSIONS[0]}", **more}


def others_before(workload: Mapping[str, Any] | None) -> int | None:
    """How many jobs of other queues that share its quota stand before it; None if nobody tells."""
    return whole(mapping(workload).get(_OTHERS))


def read(workload: Mapping[str, Any]) -> Queued:
    """Why the Workload's job is held back."""
    queue = str(mapping(workload.get("spec")).get("queueName") or "")
    position = whole(workload.get(_POSITION))
    position = None if position is None else position + 1
    conditions = {str(item.get("type")): item for item in items(mapping(workload.get("status")).get("conditions"))}
    true = _conditions(workload)
    if "Admitted" in true:
        return Queued(queue, None, f"queue {queue} has admitted it; its pods come next")
    if "QuotaReserved" in true:
        return Queued(queue, None, f"queue {queue} has reserved its quota; admission checks are still to pass")
    waits = _message(conditions.get("QuotaReserved"))
    where = f"in queue {queue}" if position is None else f"at position {position} of queue {queue}"
    reason: Reason | None = Reason.QUOTA if waits else None
    if mapping(conditions.get("QuotaReserved")).get("reason") == "Inadmissible":
        reason = Reason.USER_ERROR
    said = f"waits {where}" + (f": {waits}" if waits else "")
    evicted = true.get("Evicted", {})
    by_hand = not evicted or evicted.get("reason") == _DEACTIVATED
    if mapping(workload.get("spec")).get("active") is False:
        cause = "a user has set it inactive" if by_hand else _message(evicted)
        return Queued(queue, None if by_hand else Reason.EVICTED, f"held back from queue {queue}: {cause}")
    if not by_hand:
        preempted = evicted.get("reason") == "Preempted"
        cause = _message(true.get("Preempted")) or _message(evicted)
        word = "preempted" if preempted else "evicted"
        return Queued(queue, Reason.PREEMPTED if preempted else Reason.EVICTED, f"{word} ({cause}); {said}", position)
    return Queued(queue, reason, said, position)


def _conditions(workload: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = items(mapping(workload.get("status")).get("conditions"))
    return {str(item.get("type")): item for item in found if item.get("status") == "True"}


def _message(condition: Mapping[str, Any] | None) -> str:
    return str(mapping(condition).get("message") or "").strip()
