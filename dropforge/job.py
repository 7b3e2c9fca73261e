"""What a run's jobs ask of the cluster: the arguments of the job builder, as plain values, and their kind.

This module knows no Kubernetes client and no builder; `dropforge_airflow` and the command line hand its result to
`kubeflow_training.jobs.manifest.pytorch_job`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from math import ceil
from typing import Any, Final, Protocol

from dropforge import layout
from dropforge.errors import DropforgeError
from dropforge.estimate import disk_bytes
from dropforge.network_bench import Order
from dropforge.placement.catalogue import find, read
from dropforge.placement.fabrics import PREFLIGHT, Network, environment, preflight
from dropforge.placement.pods import ARCH, GPU_TAINT, ahead, placed, rated_gbps
from dropforge.recipe import Compute, Recipe
from dropforge.recipes.place_rules import check_disk, instance_of
from dropforge.run import RunSpec, job_name
from dropforge.volumes import pod_volumes

# Names of the environment variables a pod may need; on Kubernetes they come from one secret, never from the manifest.
SECRET = "dropforge-trainer"  # noqa: S105 - the secret's name
# Name of the runtime that TrainJobs have, one in each namespace of trainings.
RUNTIME = "dropforge"
# Trainers ask nothing of the API server.
_POD = {"automountServiceAccountToken": False}
_GRACE: Final = Compute().grace_seconds
"""Seconds that pods of TrainJobs have by their runtime. Kueue 0.19 drops from a job what its runtime does not say."""
# Before names of annotations that Kueue reads.
KUEUE = "kueue.x-k8s.io/"
# Annotation by which the operator knows where the trainer keeps the whole log.
LOG = "kubeflow-training/log"
# Annotations by which Airflow, whose XCom keeps the manifest, knows the run again: pods write its folder.
RUN_FOLDER = "dropforge/run-folder"
RUN_DIGEST = "dropforge/run-digest"
_FORGOTTEN = 3600  # seconds after which Kubernetes removes a measurement that has ended


def train_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that trains the run."""
    compute = recipe.compute
    common = _common(spec, recipe, "train")
    return {
        **common,
        "env": {**compute.env, **gang_environment(compute)},
        "annotations": {**common["annotations"], LOG: f"{spec.root}/{layout.LOGS}"},
        "command": ["python", "-m", "trainer.launch", f"{spec.root}/run.json"],
        **_placed(job_name(spec.run, "train"), compute, "train", compute.nodes),
        "nodes": compute.nodes,
        "processes_per_node": compute.processes_per_node,
        "deadline_seconds": compute.deadline_minutes * 60,
    }


def network_job(compute: Compute, name: str, order: Order) -> dict[str, Any]:
    """Arguments for the job that measures the network of such a gang: its pods, but for their command.

    It has nothing to fetch or to save, and removes itself if nobody else does. Of the claims it takes those that many
    nodes can read, where a file may lie that `network_env` names: a disk may be held by the training that runs now.
    """
    files = tuple(held for held in compute.volumes if held.read_only and held.storage != "disk")
    return {
        **_pod(compute.model_copy(update={"volumes": files})),
        "secrets": [],
        "name": name,
        "env": {**compute.env, **environment(network_of(compute), compute.network_env)},
        "command": ["python", "-m", "trainer.network", order.to_json()],
        **_placed(name, compute, "train", compute.nodes),
        "nodes": compute.nodes,
        "processes_per_node": compute.processes_per_node,
        "deadline_seconds": int(order.joining + order.seconds),
        "ttl_seconds": _FORGOTTEN,
        "labels": {"app.kubernetes.io/managed-by": "dropforge", "dropforge/purpose": "bench-network"},
    }


def network_of(compute: Compute) -> Network:
    """What the recipe says about the network of its gang."""
    if compute.instance is None:
        return Network(compute.nodes, compute.gpus, compute.fabric)
    on = find(compute.instance, read())
    return Network(compute.nodes, compute.gpus, compute.fabric, on.gpu_link or None, rated_gbps(on, compute.gpus))


def gang_environment(compute: Compute) -> dict[str, str]:
    """The variables of every pod of the gang: those of its network, and what its ranks show in the preflight."""
    network, asked = network_of(compute), compute.preflight
    env = environment(network, compute.network_env)
    several = compute.nodes * compute.processes_per_node > 1
    if several and (asked.when == "always" or (asked.when == "auto" and compute.nodes > 1 and compute.gpus > 0)):
        held = preflight(network, floor=asked.min_gb_per_second, latency=asked.max_latency_ms, seconds=asked.seconds)
        env[PREFLIGHT] = held.to_json()
    return env


class Served(Protocol):
    """What a cluster can train with."""

    @property
    def kinds(self) -> Collection[str]:
        """Names of the kinds of jobs that it knows."""

    @property
    def runtime(self) -> bool | None:
        """Whether the namespace has the runtime of TrainJobs; None if nobody may look."""

    @property
    def queued(self) -> bool:
        """Whether its queues start TrainJobs as they are."""


def training_runtime(namespace: str) -> dict[str, Any]:
    """Arguments of the runtime that says of a TrainJob's pods what a TrainJob cannot."""
    pod = {**_POD, "terminationGracePeriodSeconds": _GRACE}
    return {"name": RUNTIME, "namespace": namespace, "secrets": [SECRET], "pod": pod}


def runtime_command(namespace: str) -> str:
    """What a person types so that a namespace has that runtime."""
    return f"dropforge manifests runtime --namespace {namespace} | kubectl apply -f -"


def job_kind(compute: Compute, ask: Callable[[], Served]) -> str:
    """The kind of a recipe's jobs, where they run.

    :param ask: asks their cluster what it has; with `kind: auto` on Kubernetes, and for TrainJobs in a queue.
    :raises DropforgeError: if the cluster has Kubeflow Trainer alone, and the runtime is missing; if its queue would
        break the TrainJobs that the recipe names.
    """
    if compute.backend == "local":
        return "PyTorchJob"
    if compute.kind != "auto" and (compute.kind != "TrainJob" or compute.queue is None):
        return compute.kind
    found = ask()
    served, runtime = found.kinds, found.runtime
    why_not = why_no_train_job(compute, found)
    if compute.kind == "TrainJob":
        if why_not:
            raise DropforgeError("a TrainJob in a queue", why_not, "Set `compute.kind: auto`")
        return compute.kind
    trains = "TrainJob" in served and not why_not
    if trains and runtime:
        return "TrainJob"
    if "PyTorchJob" in served:
        return "PyTorchJob"
    if trains and runtime is None:
        return "TrainJob"
    if trains:
        raise DropforgeError(
            f"namespace {compute.namespace}",
            f"the cluster trains by TrainJobs, and there is no TrainingRuntime {RUNTIME}",
            runtime_command(compute.namespace),
        )
    return "Job"


def why_no_train_job(compute: Compute, found: Served) -> str:
    """What a recipe asks for that its TrainJobs could not have there, or would never start with; empty if nothing."""
    if compute.priority_class is not None:
        return "a TrainJob cannot name a class of priority, as `compute.priority_class` does"
    if compute.queue is None:
        return ""
    if not found.queued:
        return "there is no Kueue 0.17 or newer, and an older one takes away what a TrainJob says of its pods"
    if compute.grace_seconds != _GRACE:
        return f"Kueue takes away its `compute.grace_seconds`, which are not {_GRACE}"
    return ""


def queue_timeout(compute: Compute) -> timedelta | None:
    """How long each of its jobs may wait for its first pod; None for ever."""
    minutes = compute.queue_timeout_minutes
    return None if minutes is None else timedelta(minutes=minutes)


def tokenise_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that tokenises and packs before the training: one pod, one process, no GPU."""
    cpus, memory_gb = ahead(recipe.compute)
    return {
        **_common(spec, recipe, "tokenise"),
        **_placed(job_name(spec.run, "tokenise"), recipe.compute, "tokenise", 1),
        "cpus": cpus,
        "memory_gb": memory_gb,
        "shm_gb": None,
        "command": ["python", "-m", "trainer.ahead", f"{spec.root}/run.json"],
        "gpus": 0,
        "nodes": 1,
        "processes_per_node": 1,
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def evaluate_job(spec: RunSpec, recipe: Recipe) -> dict[str, Any]:
    """Arguments for the job that measures candidate and champion: one pod, with a process for each GPU, or as many as
    share the weights."""
    return {
        **_common(spec, recipe, "evaluate"),
        **_placed(job_name(spec.run, "evaluate"), recipe.compute, "evaluate", 1),
        "command": ["python", "-m", "trainer.evaluate", f"{spec.root}/evaluate.json"],
        "nodes": 1,
        "processes_per_node": _evaluating(recipe.compute),
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def _evaluating(compute: Compute) -> int:
    """How many processes of a pod measure: more than one are of use with GPUs of their own, or with a share each."""
    return compute.processes_per_node if compute.gpus > 1 or compute.parallel not in ("auto", "ddp") else 1


def asked_job(spec: RunSpec, recipe: Recipe, purpose: str, order: str) -> dict[str, Any]:
    """Arguments for the job that does what somebody asked for with a checkpoint: one pod, one process.

    :param purpose: a word for its name, another one for each ask. :param order: address of its order.json.
    """
    return {
        **_common(spec, recipe, purpose),
        **_placed(job_name(spec.run, purpose), recipe.compute, purpose, 1),
        "command": ["python", "-m", "trainer.asked", order],
        "nodes": 1,
        "processes_per_node": 1,
        "deadline_seconds": recipe.compute.deadline_minutes * 60,
    }


def _placed(job: str, compute: Compute, purpose: str, nodes: int) -> dict[str, Any]:
    """Which nodes a job's pods get; what needs no GPU goes to any of the image's architecture, those with GPUs too."""
    found: dict[str, Any] = {}
    if compute.instance is not None:
        on = find(compute.instance, read())
        if purpose == "tokenise" and on.gpus:
            return _passed_on(compute, {"node_selector": {ARCH: on.arch}, "tolerations": [GPU_TAINT]})
        found = placed(on, job=job, nodes=nodes, gpus=compute.gpus, fabric=compute.fabric)
    if compute.node_selector:
        found["node_selector"] = {**found.get("node_selector", {}), **compute.node_selector}
    if compute.topology is not None and nodes > 1:
        how = "required" if compute.topology_required else "preferred"
        near = {f"podset-{how}-topology": compute.topology, "podset-group-name": "gang"}  # master and workers as one
        found["pod_annotations"] = {f"{KUEUE}{key}": value for key, value in near.items()}
    return _passed_on(compute, found)


def _passed_on(compute: Compute, found: dict[str, Any]) -> dict[str, Any]:
    """What is asked for by an instance or a topology already, with what the recipe says itself."""
    if compute.tolerations:
        own = [one.model_dump(exclude_none=True) for one in compute.tolerations]
        found["tolerations"] = [*found.get("tolerations", []), *own]
    if compute.annotations:
        found["pod_annotations"] = {**compute.annotations, **found.get("pod_annotations", {})}
    if compute.ephemeral_storage_gb is not None:
        disk = {"ephemeral-storage": f"{round(compute.ephemeral_storage_gb * 1000)}M"}
        found["resources"] = {**found.get("resources", {}), **disk}
    return found


def requested_disk(recipe: Recipe) -> int | None:
    """Bytes of its node's disk that each pod of a model's own jobs requests without a limit; None for none.

    Not in a queue: Kueue never admits a job with a resource that its ClusterQueue does not cover.
    """
    compute = recipe.compute
    if compute.backend == "local" or compute.queue is not None or compute.ephemeral_storage_gb is not None:
        return None
    return None if "TMPDIR" in compute.env else disk_bytes(recipe)


def check_requested_disk(recipe: Recipe) -> None:
    """Refuse a base whose files and export are more than its instance has disk.

    :raises RecipeError: only if the base is known here, and the instance has disks of its own.
    """
    asked, name = requested_disk(recipe), recipe.compute.instance
    if asked is None or name is None:
        return
    thing = "recipe key `base`"
    mend = "Take a smaller one, or set `compute.data_cache` to a volume that has it"
    check_disk(instance_of(name), thing, ceil(asked / 1e9), mend)


def _pod(compute: Compute) -> dict[str, Any]:
    """What every job of a recipe asks for its pods."""
    return {
        "namespace": compute.namespace,
        "image": compute.image,
        "cpus": compute.cpus,
        "memory_gb": compute.memory_gb,
        "gpus": compute.gpus,
        "env": dict(compute.env),
        "secrets": [SECRET] if compute.backend == "kubernetes" else [],
        **pod_volumes(compute.volumes),
        **({"service_account": compute.service_account} if compute.service_account else {}),
        **({"image_pull_secrets": list(compute.image_pull_secrets)} if compute.image_pull_secrets else {}),
        **({"priority_class": compute.priority_class} if compute.priority_class else {}),
        **({"shm_gb": compute.shared_memory_gb} if compute.shared_memory_gb else {}),
        "user": compute.run_as,
        "pod": dict(_POD),
        "queue": compute.queue,
        "queue_priority": compute.priority,
        "grace_seconds": compute.grace_seconds,
    }


def _common(spec: RunSpec, recipe: Recipe, purpose: str) -> dict[str, Any]:
    disk = requested_disk(recipe) if purpose != "tokenise" else None
    return {
        "name": job_name(spec.run, purpose),
        **_pod(recipe.compute),
        **({"requests": {"ephemeral-storage": f"{ceil(disk / 1e9)}G"}} if disk else {}),
        "labels": {
            "app.kubernetes.io/managed-by": "dropforge",
            "dropforge/family": spec.family,
            "dropforge/run": spec.run,
            "dropforge/purpose": purpose,
        },
        "annotations": {
            RUN_FOLDER: f"{spec.root}/",
            "dropforge/run-key": layout.run_key(spec.run),
            RUN_DIGEST: spec.digest,
        },
    }
