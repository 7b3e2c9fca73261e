"""Signs that the cluster takes or took pods from a gang, told before the job's own condition says so. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.observation.reasons import Reason, disruption
from kubeflow_training.jobs.shapes import items, mapping, moment, name, text, whole

SILENT_LIMIT: Final = timedelta(minutes=5)
"""How long a node may be silent before its pod counts as lost: what Kubernetes itself waits before it evicts."""
OVERDUE_LIMIT: Final = timedelta(minutes=2)
"""How long a pod may outlive the end of its grace period: no kubelet is there to end it."""
_NEVER: Final = datetime(9000, 1, 1, tzinfo=UTC)
_REMOVED: Final = {"Preempted": Reason.PREEMPTED, "TaintManagerEviction": Reason.NODE_LOST, "Evicted": Reason.EVICTED}
_TAKEN_BACK: Final = "Cancelling deletion of Pod"
_CREATED: Final = frozenset({"SuccessfulCreatePod", "SuccessfulCreate"})
_DELETED: Final = frozenset({"SuccessfulDeletePod", "SuccessfulDelete"})
_COMBINED: Final = "(combined from similar events)"


@dataclass(frozen=True)
class Sign:
    """
    :param final: whether the gang cannot go on.
    """

    pod: Mapping[str, Any]
    reason: Reason
    message: str
    final: bool


def sign(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now: datetime
) -> Sign | None:
    """The gravest sign; the pods are of one gang that replaces none of them."""
    found = [item for pod in pods if (item := _of_pod(pod, now))]
    found += [item for item in (_replaced(job, pods, events),) if item]
    return next((item for item in found if item.final), found[0] if found else None)


def _of_pod(pod: Mapping[str, Any], now: datetime) -> Sign | None:
    status, metadata = mapping(pod.get("status")), mapping(pod.get("metadata"))
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    where = f" on {node}" if (node := text(mapping(pod.get("spec")).get("nodeName"))) else ""
    who = f"{name(pod)}{where}"
    conditions = {str(item.get("type")): item for item in items(status.get("conditions"))}
    leaving, silent_since = moment(metadata.get("deletionTimestamp")), _silent_since(status, conditions)
    if leaving is not None and (now > leaving + OVERDUE_LIMIT):
        minutes = int((now - leaving).total_seconds() // 60)
        return Sign(pod, Reason.NODE_LOST, f"{who} should have ended {minutes} minutes ago: its node is lost", True)
    if reason := disruption(pod):
        # The last message of the container may still come; that the pod goes is certain.
        why = str(mapping(conditions.get("DisruptionTarget")).get("message") or status.get("message") or "").strip()
        return Sign(pod, reason, f"{who} is taken away" + (f": {why}" if why else ""), leaving is not None)
    if silent_since is not None:
        gone = now > silent_since + SILENT_LIMIT
        return Sign(pod, Reason.NODE_LOST, f"the node of {name(pod)}{where.replace(' on', ',')} does not answer", gone)
    return None


def _silent_since(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> datetime | None:
    """Since when the pod's node has not spoken: the node controller then takes Ready away, and nothing else."""
    ready = mapping(conditions.get("Ready"))
    if status.get("phase") == "Unknown":
        return moment(ready.get("lastTransitionTime")) or _NEVER
    healthy = mapping(conditions.get("ContainersReady")).get("status") == "True"
    if status.get("phase") == "Running" and ready.get("status") == "False" and healthy:
        return moment(ready.get("lastTransitionTime"))
    return None


def created_twice(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Names of pods that their controller has created more than once, and has not itself deleted in between."""
    resumed = kind_seen(job).held_since(job)  # what was created before was deleted when the job was suspended
    # By creator: one of the same name, which was deleted and made anew within a second, is another one.
    times: dict[str, dict[str, int]] = {}
    for event in events:
        text, word = str(event.get("message") or ""), str(event.get("reason"))
        # From the tenth on, client-go tells all pods' creations as one event, under the last one's name.
        if text.startswith(_COMBINED) or word not in _CREATED | _DELETED:
            continue
        first = moment(event.get("firstTimestamp") or event.get("eventTime"))
        if resumed is not None and (first is None or first < resumed):
            continue
        count = max(whole(event.get("count")) or 1, 1)
        of_creator = times.setdefault(str(mapping(event.get("involvedObject")).get("uid")), {})
        about = text.rpartition(" ")[2]
        of_creator[about] = of_creator.get(about, 0) + (count if word in _CREATED else -count)
    return [who for pod in pods if any(found.get(who := name(pod), 0) > 1 for found in times.values())]


def removal(events: Sequence[Mapping[str, Any]], pod: str | None = None) -> tuple[Reason, str] | None:
    """Who took a pod away, by the last event that tells.

    :param pod: its name; any pod unless given.
    """
    for event in reversed(events):
        about, word = mapping(event.get("involvedObject")), str(event.get("reason"))
        if str(event.get("message")).startswith(_TAKEN_BACK):
            continue  # the node was back in time, or the pod gone by other means
        if word in _REMOVED and about.get("kind") == "Pod" and pod in (None, about.get("name")):
            return _REMOVED[word], f"{about.get('name')}: {str(event.get('message') or word).strip()}"
    return None


def _replaced(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Sign | None:
    """A pod that was created twice: the first was removed from outside, and the events of that name may say by whom."""
    for who in created_twice(job, pods, events):
        pod = next(item for item in pods if name(item) == who)
        reason, by = removal(events, who) or (Reason.EVICTED, "")
        what = f"the pod before this {who} was removed from outside, and the job cannot take in a new one"
        return Sign(pod, reason, what + (f" ({by})" if by else ""), True)
    return None
