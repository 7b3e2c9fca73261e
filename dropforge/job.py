"""What a run's jobs ask of the cluster: the arguments of the PyTorchJob builder, as plain values.

This module knows no Kubernetes client and no builder; `dropforge_airflow` and the command line hand its result to
`kubeflow_training.jobs.manifest.pytorch_job`.
"""

from __future__ import annotations

from typing import Any

from dropforge import layout
from dropforge.recipe import Recipe
from dropforge.run import RunSpec, job_name
from dropforge.volumes import pod_volumes

# Names of the environment variables a pod may need; on Kubernetes they come from one secret, never from the manifest.
SECRET = "dropforge-trainer"  # noqa: S105 - the secret's name
# Annotation by which the operator knows where the trainer keeps the whole log.
LOG = "kubeflow-training/log"


def train_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that trains the run."""
    compute = recipe.compute
    common = _common(spec, recipe, "train")
    return {
        **common,
        "annotations": {**common["annotations"], LOG: f"{spec.root}/{layout.LOGS}"},
        "command": ["python", "-m", "trainer.launch", f"{spec.root}/run.json"],
        "nodes": compute.nodes,
        "processes_per_node": compute.processes_per_node,
        "deadline_seconds": compute.deadline_minutes * 60,
    }


def tokenise_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that tokenises and packs before the training: one pod, one process, no GPU."""
    return {
        **_common(spec, recipe, "tokenise"),
        "command": ["python", "-m", "trainer.ahead", f"{spec.root}/run.json"],
        "gpus": 0,
        "nodes": 1,
        "processes_per_node": 1,
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def evaluate_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that measures candidate and champion: one pod, one process."""
    return {
        **_common(spec, recipe, "evaluate"),
        "command": ["python", "-m", "trainer.evaluate", f"{spec.root}/evaluate.json"],
        "nodes": 1,
        "processes_per_node": 1,
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def asked_job(spec: RunSpec, recipe: Recipe, purpose: str, order: str) -> dict[str, Any]:
    """Arguments for the job that does what somebody asked for with a checkpoint: one pod, one process.

    :param purpose: a word for its name, another one for each ask. :param order: address of its order.json.
    """
    return {
        **_common(spec, recipe, purpose),
        "command": ["python", "-m", "trainer.asked", order],
        "nodes": 1,
        "processes_per_node": 1,
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def _common(spec: RunSpec, recipe: Recipe, purpose: str) -> dict[str, Any]:
    compute = recipe.compute
    return {
        "name": job_name(spec.run, purpose),
        "namespace": compute.namespace,
        "image": compute.image,
        "cpus": compute.cpus,
        "memory_gb": compute.memory_gb,
        "gpus": compute.gpus,
        "env": {},
        "secrets": [SECRET] if compute.backend == "kubernetes" else [],
        **pod_volumes(compute.volumes),
        "queue": compute.queue,
        "grace_seconds": compute.grace_seconds,
        "labels": {
            "app.kubernetes.io/managed-by": "dropforge",
            "dropforge/family": spec.family,
            "dropforge/run": spec.run,
            "dropforge/purpose": purpose,
        },
        "annotations": {"dropforge/run-folder": f"{spec.root}/", "dropforge/run-key": layout.run_key(spec.run)},
    }
