"""What the keys of `compute` that pods are given as they are may not say: what harms the job, or shows a secret."""

from __future__ import annotations

from typing import Final

from dropforge.errors import RecipeError
from dropforge.recipe import Compute
from dropforge.recipe_network import PREFIXES
from dropforge.secret_looks import looks_secret

#: Beginnings of variables that the operator, the launcher or the Kubernetes secret sets.
_SET: Final = ("PET_", "TORCHELASTIC_", "MASTER_", "AWS_", "MLFLOW_", "DROPFORGE_", "KUBEFLOW_")
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "POD_NAME")
#: Beginnings of annotations that Dropforge and Kueue read.
_OURS: Final = ("dropforge/", "kubeflow-training/", "kueue.x-k8s.io/")


def check_pods(compute: Compute) -> None:
    """:raises RecipeError: for the first of them that cannot be as it is."""
    for name, text in compute.env.items():
        key = f"recipe key `compute.env.{name}`"
        if name.startswith(PREFIXES):
            raise RecipeError(key, "it is a variable of the network", "Write it under `compute.network_env`")
        if name.startswith(_SET) or name in _RANKS:
            mend = "Remove it. Addresses and keys come from the Kubernetes secret `dropforge-trainer`"
            raise RecipeError(key, "the job sets this variable itself", mend)
        if looks_secret(name, text):
            raise RecipeError(
                key,
                "it looks like a secret, and everyone who may read the recipe or the job could read it",
                "Put it into the Kubernetes secret `dropforge-trainer`, whose keys become variables of every pod",
            )
    for name, text in compute.annotations.items():
        key = f"recipe key `compute.annotations.{name}`"
        if name.startswith(_OURS):
            raise RecipeError(key, "the job sets this annotation itself", "Remove it")
        if looks_secret("", text):
            cause = "it looks like a secret, and everyone who may read the job could read it"
            raise RecipeError(key, cause, "Name a Kubernetes secret instead")
    if compute.kind != "auto" and compute.backend == "local":
        raise RecipeError(
            "recipe key `compute.kind`",
            "the local backend runs processes of this machine, of one kind",
            "Remove it, or use `backend: kubernetes`",
        )
    if compute.min_nodes is not None:
        _check_min_nodes(compute, compute.min_nodes)
    if compute.kind == "TrainJob" and compute.priority_class is not None:
        raise RecipeError(
            "recipe key `compute.priority_class`",
            "a TrainJob cannot name one: its pods have that of their runtime",
            "Remove it, or set `compute.kind` to PyTorchJob or Job",
        )
    if compute.priority_class is not None and compute.queue is not None:
        raise RecipeError(
            "recipe key `compute.priority_class`",
            "pods in a Kueue queue have no PriorityClass: it would pass by the queue, and end pods of running jobs",
            "Use `compute.priority`, or remove `compute.queue`",
        )
    if compute.shared_memory_gb is not None and compute.shared_memory_gb >= compute.memory_gb:
        raise RecipeError(
            "recipe key `compute.shared_memory_gb`",
            f"{compute.shared_memory_gb:g} GB of the pod's {compute.memory_gb:g} GB leave no memory for the training",
            "Make it smaller, or `compute.memory_gb` larger: one contains the other",
        )


def _check_min_nodes(compute: Compute, least: int) -> None:
    key = "recipe key `compute.min_nodes`"
    if least >= compute.nodes:
        raise RecipeError(
            key, f"{least} is no fewer than `compute.nodes`, {compute.nodes}", "Make it smaller, or remove it"
        )
    if compute.queue_timeout_minutes is None:
        raise RecipeError(
            key, "it does not say how long to wait for the other pods' nodes", "Set `compute.queue_timeout_minutes`"
        )
    if compute.queue is not None:
        raise RecipeError(
            key, "Kueue lets all pods of a job start together, or none", "Remove it, or remove `compute.queue`"
        )
    if compute.kind == "Job":
        raise RecipeError(key, "a plain Job has one size", "Remove it, or set `compute.kind` to TrainJob or PyTorchJob")
