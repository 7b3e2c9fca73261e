"""What clients and the supervisor read of the files that others wrote: what is not sound counts as not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.local.capacity import Resources, gang_resources
from kubeflow_training.jobs.local.layout import read_json
from kubeflow_training.jobs.shapes import items, mapping, whole


def read_job(folder: Path) -> dict[str, Any] | None:
    """The job of a folder: `uid`, `order`, `created` and `manifest`; None if the file holds none."""
    job = read_json(folder / "job.json")
    if job is None or not (isinstance(job.get("uid"), str) and isinstance(job.get("created"), str)):
        return None
    manifest, order = mapping(job.get("manifest")), job.get("order")
    named = all(isinstance(mapping(manifest.get("metadata")).get(key), str) for key in ("name", "namespace"))
    if not named or not isinstance(order, int):
        return None
    try:
        gang_resources(manifest)  # whoever reads the job asks for them, of as many pods as it has or fewer
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return None
    return job


def read_state(folder: Path) -> dict[str, Any]:
    """What the supervisor has written of a job, each part empty if not sound.

    `status`, `pods`, `events`; `plan` once it was started; `ending` once its pods are to end; `lost` and `restarts` of
    its pods.
    """
    found = read_json(folder / "state.json") or {}
    pods = [pod for pod in items(found.get("pods")) if mapping(pod.get("metadata")).get("name")]
    status = dict(mapping(found.get("status")))
    if "conditions" in status:
        status["conditions"] = [item for item in items(status["conditions"]) if {"type", "status"} <= item.keys()]
    return {
        "status": status,
        "pods": [{**pod, "status": mapping(pod.get("status"))} for pod in pods],
        "events": items(found.get("events")),
        "plan": _plan(found.get("plan")),
        "ending": _ending(found.get("ending")),
        "lost": {name: at for name, at in mapping(found.get("lost")).items() if isinstance(at, str)},
        "restarts": {name: count for name, count in mapping(found.get("restarts")).items() if isinstance(count, int)},
    }


def _plan(found: Any) -> dict[str, Any] | None:
    """Where a job runs: its port, its pods' GPUs, and the names of the pods if they are noted."""
    if not isinstance(found, Mapping):
        return None
    gpus = {name: names for name, names in mapping(found.get("gpus")).items() if isinstance(names, list)}
    plan: dict[str, Any] = {"port": whole(found.get("port")), "gpus": gpus}
    return {**plan, "pods": found["pods"]} if isinstance(found.get("pods"), list) else plan


def _ending(found: Any) -> dict[str, Any] | None:
    ending = mapping(found)
    if not isinstance(ending.get("why"), str):
        return None
    return {"why": ending["why"], "grace": seconds(ending.get("grace")), "at": ending.get("at")}


def seconds(found: Any) -> float | None:
    """A number of seconds; None if it is none."""
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def read_record(path: Path) -> dict[str, Any] | None:
    """What a pod's keeper has written: `keeper`, `session` and `state`; None if that is not sound."""
    found = read_json(path) or {}
    state, keeper = mapping(found.get("state")), mapping(found.get("keeper"))
    if "terminated" in state:
        is_sound = whole(mapping(state["terminated"]).get("exitCode")) is not None
    else:
        is_sound = "running" in state and isinstance(keeper.get("pid"), int)
    return found if is_sound else None


def read_offers(path: Path) -> Resources | None:
    """What a supervisor says that it offers; None if that is not sound."""
    found = read_json(path) or {}
    cpus, memory, gpus = (found.get(key) for key in ("cpus", "memory", "gpus"))
    if not (isinstance(cpus, int | float) and isinstance(memory, int | float) and isinstance(gpus, int)):
        return None
    return Resources(cpus, memory, gpus)
