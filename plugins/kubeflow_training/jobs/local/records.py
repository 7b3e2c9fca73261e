"""What clients read of the files that others wrote: a job that is none is passed over, as the supervisor does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.local.capacity import Resources, gang_resources
from kubeflow_training.jobs.local.layout import read_json
from kubeflow_training.jobs.shapes import items, mapping


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
    """What the supervisor has written of a job: `status`, `pods`, `events`, `plan`, each empty if not sound."""
    found = read_json(folder / "state.json") or {}
    pods = [pod for pod in items(found.get("pods")) if mapping(pod.get("metadata")).get("name")]
    plan, status = found.get("plan"), dict(mapping(found.get("status")))
    if "conditions" in status:
        status["conditions"] = [item for item in items(status["conditions"]) if {"type", "status"} <= item.keys()]
    return {
        "status": status,
        "pods": [{**pod, "status": mapping(pod.get("status"))} for pod in pods],
        "events": items(found.get("events")),
        "plan": plan if isinstance(plan, Mapping) else None,
    }


def read_offers(path: Path) -> Resources | None:
    """What a supervisor says that it offers; None if that is not sound."""
    found = read_json(path) or {}
    cpus, memory, gpus = (found.get(key) for key in ("cpus", "memory", "gpus"))
    if not (isinstance(cpus, int | float) and isinstance(memory, int | float) and isinstance(gpus, int)):
        return None
    return Resources(cpus, memory, gpus)
