"""From what a recipe asks for to the manifests of its jobs, of the kind that the user's cluster trains with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dropforge.cli.gangs import api_client, asking_cluster
from dropforge.job import RUNTIME, job_kind, training_runtime
from dropforge.recipe import Compute

if TYPE_CHECKING:
    from kubeflow_training.jobs.kinds import Kind


def kind_for(compute: Compute) -> Kind:
    """The kind of a recipe's jobs; with `kind: auto` the cluster of the kubeconfig is asked what it has.

    :raises DropforgeError: if it cannot be reached, or lacks what the jobs need.
    """
    from kubeflow_training.jobs.kinds import kind_named
    from kubeflow_training.jobs.kubernetes.discovery import served

    with asking_cluster():
        return kind_named(job_kind(compute, lambda: served(api_client(), compute.namespace, RUNTIME)))


def manifest_of(arguments: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """The manifest of a job. :param arguments: as `dropforge.job` gives them."""
    from kubeflow_training.jobs.kinds.compile import compiled
    from kubeflow_training.jobs.manifest import pytorch_job

    with asking_cluster():
        return compiled(pytorch_job(**arguments), kind, runtime=runtime_of(arguments["namespace"]))


def runtime_of(namespace: str) -> dict[str, Any]:
    """The TrainingRuntime that TrainJobs of a namespace have."""
    from kubeflow_training.jobs.kinds.compile import training_runtime as made

    return made(**training_runtime(namespace))
