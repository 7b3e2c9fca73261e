"""What is told of a job's end: the task's result, and the text of a failure. Pure; the same in both modes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.manifest.words import GANG_ANNOTATION
from kubeflow_training.jobs.observation import Observation
from kubeflow_training.jobs.shapes import items, mapping, moment, storable, whole

MESSAGE_LIMIT: Final = 4096
"""Bytes; Kubernetes takes no longer termination message."""
_LINE: Final = 2000  # characters of a log line in a failure's text


def result(observation: Observation, job: Mapping[str, Any], message: Any = None) -> dict[str, Any]:
    """What the task returns.

    :param job: name, namespace, uid and gang, and the Unix time of its creation, if known.
    :param message: rank 0's termination message.
    """
    created, started = job.get("created"), observation.started
    queued = started.timestamp() - created if started is not None and isinstance(created, int | float) else None
    placed = observation.placed
    pulled = (started - placed).total_seconds() if started is not None and placed is not None else None
    durations = {"queued": queued, "pulled": pulled, "running": observation.seconds}
    return {
        "phase": str(observation.phase),
        **{key: job.get(key) for key in ("name", "namespace", "uid", "gang")},
        # Kubernetes tells whole seconds, and its clock is not ours.
        "durations": {name: None if seconds is None else max(0.0, seconds) for name, seconds in durations.items()},
        "message": message,
        "progress": observation.progress.to_dict() if observation.progress else None,
    }


def last_words(snapshot: Snapshot | None) -> Any:
    """Rank 0's termination message: a JSON value if it is one, else text; None without one.

    It is that of the pod with node rank 0, unless this one names another rank or says nothing, and another pod says
    that it has rank 0: torchrun gives the ranks of an elastic gang in the order in which its nodes come.
    """
    if snapshot is None:
        return None
    kind = kind_seen(snapshot.job)
    told: dict[int, Any] = {}
    for pod in snapshot.pods:
        trainer = kind.training_container(pod)
        for container in items(mapping(pod.get("status")).get("containerStatuses")):
            words = mapping(mapping(container.get("state")).get("terminated")).get("message")
            if container.get("name") == trainer and isinstance(words, str) and words.strip():
                told[kind.node_rank(pod, snapshot.job)] = _read(words)
    first = told.get(0)
    if first is not None and mapping(first).get("rank") in (None, 0):
        return first
    return next((words for words in told.values() if whole(mapping(words).get("rank")) == 0), first)


def created(snapshot: Snapshot) -> float | None:
    """Unix time of the job's creation."""
    found = moment(mapping(snapshot.job.get("metadata")).get("creationTimestamp"))
    return found.timestamp() if found else None


def gang(snapshot: Snapshot) -> int | None:
    """Number of the gang, if the job says so."""
    return whole(snapshot.annotations.get(GANG_ANNOTATION))


def failure_text(name: str, gang: int, observation: Observation, tail: Sequence[str]) -> str:
    """What a job that ended badly has to say: rank, exit code, node, reason, mend and last lines."""
    reason = observation.reason or "unknown"
    lines = [f"{name} (attempt {gang}) {observation.phase}, {reason}: {observation.message}. {observation.mend}."]
    if observation.progress:
        lines.append(f"It had come to {observation.progress}.")
    if tail:
        lines.append(f"Last lines of {observation.replica}:")
        lines += [f"    {line[:_LINE]}" for line in tail]
    return str(storable("\n".join(lines)))


def _read(told: str) -> Any:
    cut = told.encode(errors="replace")[:MESSAGE_LIMIT].decode(errors="ignore")
    try:
        return storable(json.loads(cut, parse_constant=lambda word: word))
    except (ValueError, RecursionError):
        return storable(cut.strip())
