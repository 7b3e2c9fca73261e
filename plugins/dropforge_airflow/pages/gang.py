"""The job of a task, as the cluster tells it now. Only a job that this very task owns is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kubeflow_training.jobs.observation import Observation, observe
from kubeflow_training.jobs.observation.progress import last
from kubeflow_training.jobs.observation.replicas import replicas

from dropforge_airflow.pages.task import Seen

if TYPE_CHECKING:
    from kubeflow_training.jobs.backend import Backend, Snapshot

MOST_PODS: Final = 8  # whose lines are shown at once
_LINES: Final = 200  # of each pod, from which the last of each rank are taken


@dataclass(frozen=True)
class Gang:
    """A job and what it is doing.

    :param tails: the last lines of each pod's log, by its name. :param backend: where the job is, to read more of it.
    """

    snapshot: Snapshot
    observation: Observation
    tails: Mapping[str, list[str]] = field(default_factory=dict)
    backend: Backend | None = None


def look(seen: Seen) -> Gang | None:
    """The task's job; None if it is gone.

    :raises JobError: if the cluster is away, or does not let us look.
    """
    backend = _backend(seen.job)
    found = backend.read(str(seen.job["name"]), str(seen.job.get("namespace") or "default"))
    if found is None or not _own(found, seen):
        return None
    observation = observe(found.job, found.pods, found.events, pods_listed=found.pods_listed)
    return Gang(found, observation, backend=backend)


def heard(found: Gang, replica: str | None) -> list[str]:
    """The pods whose lines are shown: those of this replica; else the first few, and the one that failed."""
    places = {item.pod: item.replica for item in replicas(found.snapshot.job, found.snapshot.pods)}
    if replica is not None:
        return [pod for pod, place in places.items() if pod and place == replica]
    first = [found.observation.pod] if found.observation.pod in places else []
    return [pod for pod in dict.fromkeys([*first, *places]) if pod][:MOST_PODS]


def tail(found: Gang, pod: str) -> list[str]:
    """The last lines of a pod. :raises JobError: if they cannot be had, as of a node that does not answer."""
    assert found.backend is not None
    return found.backend.tail(next(one for one in found.snapshot.pods if one["metadata"]["name"] == pod), _LINES)


def with_lines(found: Gang, tails: Mapping[str, list[str]]) -> Gang:
    """The same job with the lines of its pods, which tell how far it has come."""
    progress = last(line for lines in tails.values() for line in lines)
    if progress is None:
        return replace(found, tails=tails)
    job = found.snapshot
    observation = observe(job.job, job.pods, job.events, progress, pods_listed=job.pods_listed)
    return replace(found, observation=observation, tails=tails)


def _backend(job: Mapping[str, Any]) -> Backend:
    from kubeflow_training.hooks import PyTorchJobHook

    # A stored identity says `kubernetes:CONN`, what was published `kubernetes`.
    backend, _, connection = str(job.get("backend") or "").partition(":")
    more = {"kubernetes_conn_id": connection} if connection and backend == "kubernetes" else {}
    return PyTorchJobHook(backend, kind=str(job.get("kind") or "PyTorchJob"), **more).connect()


def _own(found: Snapshot, seen: Seen) -> bool:
    """Whether the job says that it belongs to this task: where it is comes from values that people may change."""
    from kubeflow_training.jobs.manifest.ownership import Owner

    return Owner.of(found.job) == Owner(seen.dag, seen.dag_run, seen.task, seen.map_index)
