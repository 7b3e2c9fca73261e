"""What a page shows beside the observation: each pod in its place, and what happened to the job in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kubeflow_training.jobs.kinds import Kind, kind_seen
from kubeflow_training.jobs.observation.reasons import ending
from kubeflow_training.jobs.shapes import born, items, last_seen, mapping, moment, name, text, whole


@dataclass(frozen=True)
class Replica:
    """One pod of a gang.

    :param replica: like `worker-0`. :param phase: the pod's, or why its container waits.
    :param exit_code: of its training container, once that has ended. :param message: its last words, if it ended badly.
    """

    replica: str
    pod: str
    node: str | None
    phase: str
    exit_code: int | None
    restarts: int
    started: datetime | None
    finished: datetime | None
    message: str


@dataclass(frozen=True)
class Moment:
    """Something that happened to a job. :param holds: False for a condition that is no longer true."""

    when: datetime | None
    what: str
    message: str
    holds: bool = True


def replicas(job: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]]) -> tuple[Replica, ...]:
    """The pods of a job by their node rank."""
    job = mapping(job)
    kind = kind_seen(job)
    order = sorted(items(list(pods)), key=lambda pod: (kind.node_rank(pod, job), name(pod)))
    return tuple(_replica(pod, kind, job) for pod in order)


def moments(job: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]] = ()) -> tuple[Moment, ...]:
    """A job's creation, its conditions, and events about it, in the order of time; of one that is gone the events."""
    job = mapping(job)
    conditions = items(mapping(job.get("status")).get("conditions"))
    found = []
    if job and not any(item.get("type") == "Created" for item in conditions):
        found.append(Moment(moment(mapping(job.get("metadata")).get("creationTimestamp")), "Created", ""))
    for item in conditions:
        when = moment(item.get("lastTransitionTime") or item.get("lastUpdateTime"))
        said = str(item.get("message") or item.get("reason") or "")
        found.append(Moment(when, str(item.get("type") or "?"), said, item.get("status") == "True"))
    for event in items(list(events)):
        if event.get("kind") not in ("Workload", "Node"):  # these travel among the events
            found.append(Moment(last_seen(event), str(event.get("reason") or "?"), str(event.get("message") or "")))
    start = born(job)
    return tuple(sorted(found, key=lambda item: item.when or start))


def _replica(pod: Mapping[str, Any], kind: Kind, job: Mapping[str, Any]) -> Replica:
    status = mapping(pod.get("status"))
    training = kind.training_container(pod)
    container = next((item for item in items(status.get("containerStatuses")) if item.get("name") == training), {})
    state = mapping(mapping(container).get("state"))
    ended, bad = mapping(state.get("terminated")), ending(pod, kind, job)
    waits = mapping(state.get("waiting")).get("reason")
    return Replica(
        replica=kind.replica(pod),
        pod=name(pod),
        node=text(mapping(pod.get("spec")).get("nodeName")),
        phase=str(waits or status.get("phase") or "Unknown"),
        exit_code=bad.exit_code if bad else whole(ended.get("exitCode")),
        restarts=whole(mapping(container).get("restartCount")) or 0,
        started=moment(ended.get("startedAt") or mapping(state.get("running")).get("startedAt")),
        finished=moment(ended.get("finishedAt")),
        message=bad.message if bad else "",
    )
