"""From what a recipe asks for to the manifests of its jobs, of the kind that their cluster trains with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.kinds import Kind, kind_named
from kubeflow_training.jobs.kinds.compile import compiled
from kubeflow_training.jobs.kinds.compile import training_runtime as made_runtime
from kubeflow_training.jobs.manifest import pytorch_job

from dropforge.job import RUNTIME, job_kind, training_runtime
from dropforge.recipe import Compute


def kind_for(compute: Compute) -> Kind:
    """The kind of a recipe's jobs; with `kind: auto` their cluster is asked what it has.

    :raises JobError: if it does not answer. :raises DropforgeError: if it lacks what the jobs need.
    """
    return kind_named(job_kind(compute, lambda: PyTorchJobHook(compute.backend).served(compute.namespace, RUNTIME)))


def manifest(arguments: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """The manifest of a job. :param arguments: as `dropforge.job` gives them."""
    runtime = made_runtime(**training_runtime(arguments["namespace"]))
    return compiled(pytorch_job(**arguments), kind, runtime=runtime)
