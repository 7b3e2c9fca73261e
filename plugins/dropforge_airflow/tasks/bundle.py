"""What the cluster said of a gang that failed: kept in the run's folder before the gang goes, and named in MLflow.

Beside it lie what the pods kept themselves: stacks and flight records in `failures/POD/`, the log in `logs/POD/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dropforge import gangs, layout
from dropforge.gangs import Gang
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge.store import Store
from dropforge.text import as_line

if TYPE_CHECKING:
    from kubeflow_training.jobs.backend import Backend, Snapshot
    from kubeflow_training.jobs.observation import Observation

_PODS_ASKED: Final = 8


def keep(store: Store, spec: RunSpec, job: Mapping[str, Any], seen: Observation, backend: Backend) -> str | None:
    """Keep it once, by whoever sees the failure first; its address, or None if it was there already.

    :param job: name, namespace, uid and gang.
    """
    key = layout.failure_key(spec.run, str(job["uid"]))
    if store.stat(key) is not None:
        return None
    snapshot = backend.read(str(job["name"]), str(job["namespace"]))
    if snapshot is not None and snapshot.uid != job["uid"]:
        snapshot = None
    found = gathered(job, seen, snapshot, _events(backend, job, seen, snapshot))
    if not store.put_if_absent(key, json.dumps(found, indent=1, default=str).encode()):
        return None
    return _address(spec, key)


def _address(spec: RunSpec, key: str) -> str:
    return f"{spec.root}/{key.removeprefix(layout.run_prefix(spec.run))}"


def link(spec: RunSpec, job: Mapping[str, Any], seen: Observation, where: str, failed: Sequence[Gang]) -> None:
    """Name it, and the failure, on the MLflow run; and of all trainings that failed why, and the steps they lost.

    :param failed: the run's gangs that trained and failed, this one among them if it did.
    """
    from dropforge import tracking

    if spec.tracking is None:
        return
    tags = {tracking.TAG_FAILURE: f"{where} attempt {job.get('gang')}: {seen.reason or 'unknown'}: {seen.message}"}
    tags |= _causes(failed)
    with tracking.short_patience():
        for tag, text in tags.items():
            tracking.note(from_env().tracking_uri, spec.tracking.run_id, tag, text)


def unlinked(store: Store, spec: RunSpec) -> dict[str, str]:
    """What `link` would have noted of a run's trainings and is not on its MLflow run, which was away then."""
    from dropforge import tracking

    failed = gangs.failed(gangs.kept(store, spec.run), "train")
    if spec.tracking is None or not failed:
        return {}
    last = failed[-1]
    where = _address(spec, layout.failure_key(spec.run, last.uid))
    tags = {tracking.TAG_FAILURE: f"{where} attempt {last.number}: {last.reason or 'unknown'}", **_causes(failed)}
    known = tracking.client(from_env().tracking_uri).get_run(spec.tracking.run_id).data.tags
    return {tag: as_line(text, 4900) for tag, text in tags.items() if tag not in known}


def _causes(failed: Sequence[Gang]) -> dict[str, str]:
    from dropforge import tracking

    if not failed:
        return {}
    lost = gangs.lost_steps(failed)
    return {
        tracking.TAG_CAUSES: ", ".join(gang.reason for gang in failed),
        tracking.TAG_LOST: "unknown" if lost is None else str(lost),
    }


def gathered(
    job: Mapping[str, Any], seen: Observation, snapshot: Snapshot | None, events: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The bundle. Of pods without their spec, which is the job's: what a cluster adds to it may hold secrets."""
    pods = snapshot.pods if snapshot is not None else ()
    return {
        "gang": {key: job.get(key) for key in ("name", "namespace", "uid", "gang", "kind")},
        "observation": seen.to_dict(),
        "job": snapshot.job if snapshot is not None else None,
        "pods": [
            {
                "name": pod["metadata"]["name"],
                "node": (pod.get("spec") or {}).get("nodeName"),
                "status": pod.get("status"),
                "log": f"{layout.LOGS}{layout.pod_folder(pod['metadata']['name'])}/",
                "traces": f"{layout.FAILURES}{layout.pod_folder(pod['metadata']['name'])}/",
            }
            for pod in pods
        ],
        "events": [event for event in events if event.get("kind") != "Node"],
        "nodes": [event for event in events if event.get("kind") == "Node"],
    }


def _events(
    backend: Backend, job: Mapping[str, Any], seen: Observation, snapshot: Snapshot | None
) -> list[Mapping[str, Any]]:
    """Of the job and its first pods, that of the first failure before others; oldest first."""
    told = list(snapshot.events) if snapshot is not None else []
    ask = getattr(backend, "last_words", None)
    if ask is None:
        return told
    pods = sorted(snapshot.pods if snapshot is not None else (), key=lambda pod: pod["metadata"]["name"] != seen.pod)
    for uid in (job["uid"], *(pod["metadata"]["uid"] for pod in pods[:_PODS_ASKED])):
        told += ask(str(job["namespace"]), str(uid))
    by_uid = {str((event.get("metadata") or {}).get("uid") or number): event for number, event in enumerate(told)}
    return list(by_uid.values())
