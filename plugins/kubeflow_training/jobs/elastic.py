"""Elastic jobs: gangs that train on with fewer nodes while some are missing. Pure functions over manifests and pods.

A PyTorchJob is elastic in place: torchrun's agents meet by c10d, go on with those that are there and take in whoever
comes back. Any other gang is started again at the size that fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any, Final

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.shapes import items, mapping, moment, whole

SUCCESS_ANNOTATION: Final = "kubeflow-training/success"
RANK_0_REPORTS: Final = "rank-0-reports"
"""Value of the annotation: success counts only if a pod's termination message says that rank 0 is done."""
REPORT_TIME: Final = timedelta(minutes=5)
"""How long rank 0 has for its report after a worker ended well: torchrun's agents wait that long for one another."""
FITS_REASON: Final = "GangWaits"
"""Reason of a local pod that has room and waits for the rest of its gang."""


# The join timeout outlasts node start and image pull. The rest is torch's: 30 s of last call, 15 s to lose a node.
_RENDEZVOUS: Final = {"join_timeout": "1200"}
# Agents that share their store keep the address of a rank 0 that is gone, and wait there for ever (torch 2.15).
_ENVIRONMENT: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def elastic(
    manifest: Mapping[str, Any],
    *,
    min_nodes: int,
    max_nodes: int | None = None,
    restarts: int = 10,
    group_restarts: int = 100,
    rendezvous: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The PyTorchJob as one that goes on with `min_nodes` to `max_nodes` pods; its command must be torchrun.

    All pods become workers, because the end of a master is the end of the job. The pods are restarted in place.

    :param manifest: a PyTorchJob with a master.
    :param min_nodes: how few pods can train.
    :param max_nodes: how many; the manifest's own number of pods unless given.
    :param restarts: of pods, in all, before the job fails.
    :param group_restarts: of the ranks by torchrun after one of them failed; a node that leaves or comes costs none.
    :param rendezvous: settings of torch's c10d rendezvous, like `last_call_timeout` (how long a start waits for more
        nodes than the least) and `keep_alive_interval`, in seconds.
    :raises ManifestError: if the numbers are none, or the manifest is no PyTorchJob with a master.
    """
    name = str(mapping(manifest.get("metadata")).get("name"))
    replicas = mapping(mapping(manifest.get("spec")).get("pytorchReplicaSpecs"))
    if "Master" not in replicas:
        raise ManifestError(f"job {name}", "it has no master to start from", "Build it with pytorch_job()")
    most = max_nodes if max_nodes is not None else _pods(replicas)
    if not 1 <= min_nodes <= most:
        raise ManifestError(
            f"job {name}", f"{min_nodes} to {most} nodes is no range", "Let min_nodes be 1 or more, max_nodes no less"
        )
    changed = deepcopy(dict(manifest))
    spec, worker = changed["spec"], changed["spec"]["pytorchReplicaSpecs"]["Master"]
    for container in worker["template"]["spec"]["containers"]:
        own = [item for item in container.get("env") or [] if item.get("name") != "PET_RDZV_CONF"]
        named = {item.get("name") for item in own}
        more = [{"name": key, "value": value} for key, value in _ENVIRONMENT.items() if key not in named]
        container["env"] = [*own, *more]
    # OnFailure: the kubelet starts the container again in its pod, with the pod's name and the other agents' patience.
    spec["pytorchReplicaSpecs"] = {"Worker": {**worker, "replicas": most, "restartPolicy": "OnFailure"}}
    policy = dict(mapping(spec.get("runPolicy")))
    if policy.get("cleanPodPolicy") == "Running":
        # The first worker that ends well is the job's success for the operator: rank 0 may still write its report.
        policy["cleanPodPolicy"] = "None"
    spec["runPolicy"] = {**policy, "backoffLimit": restarts}
    settings = _RENDEZVOUS | dict(rendezvous or {})
    # No metrics: with them the operator makes an autoscaler that counts CPU, which says nothing about training.
    spec["elasticPolicy"] = {
        "rdzvBackend": "c10d",
        "minReplicas": min_nodes,
        "maxReplicas": most,
        "maxRestarts": group_restarts,
        "rdzvConf": [{"key": key, "value": str(value)} for key, value in sorted(settings.items())],
    }
    changed["metadata"]["annotations"] = {
        **mapping(changed["metadata"].get("annotations")),
        SUCCESS_ANNOTATION: RANK_0_REPORTS,
    }
    return changed


def node_range(job: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most pods with which the PyTorchJob trains; the same number twice if it is not elastic."""
    spec = mapping(job.get("spec"))
    most = _pods(mapping(spec.get("pytorchReplicaSpecs")))
    policy = spec.get("elasticPolicy")
    least = whole(mapping(policy).get("minReplicas")) if isinstance(policy, Mapping) else None
    return (most if least is None else max(1, min(least, most))), most


def resized(manifest: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """The manifest for a gang of another size, for a job type that cannot change it in place.

    Take the fingerprint before: it is the same job, and grows again from the same manifest.

    :param manifest: a PyTorchJob or TrainJob.
    :param nodes: pods of the gang.
    :raises ManifestError: for less than one node, a size outside of its elasticPolicy, or a kind without sizes.
    """
    name = str(mapping(manifest.get("metadata")).get("name"))
    changed = deepcopy(dict(manifest))
    spec = changed.get("spec") or {}
    least, most = node_range(manifest) if spec.get("elasticPolicy") else (1, nodes)
    if not max(1, least) <= nodes <= most:
        raise ManifestError(f"job {name}", f"it cannot run on {nodes} nodes", f"Ask for {max(1, least)} to {most}")
    if "pytorchReplicaSpecs" in spec:
        replicas = spec["pytorchReplicaSpecs"]
        workers = nodes - (1 if "Master" in replicas else 0)
        if workers:
            replicas["Worker"] = {**replicas.get("Worker", replicas.get("Master", {})), "replicas": workers}
        else:
            replicas.pop("Worker", None)
        scheduling = mapping(mapping(spec.get("runPolicy")).get("schedulingPolicy"))
        if (whole(scheduling.get("minAvailable")) or 0) > nodes:
            # A gang scheduler would wait for more pods than there are.
            spec["runPolicy"]["schedulingPolicy"]["minAvailable"] = nodes
    elif "trainer" in spec:
        spec["trainer"]["numNodes"] = nodes
    else:
        raise ManifestError(f"job {name}", "its kind has no number of nodes", "Use a PyTorchJob or a TrainJob")
    return changed


def nodes_to_be_had(pods: Iterable[Mapping[str, Any]]) -> int:
    """How many pods of a waiting gang have a place: the size at which it could start now."""
    return sum(1 for pod in pods if _has_place(pod))


def unplaced_since(pods: Iterable[Mapping[str, Any]]) -> datetime | None:
    """When the first of the pods was created that want a place and have none."""
    waiting = [mapping(pod.get("metadata")) for pod in pods if not _is_over(pod) and not _has_place(pod)]
    return min((born for metadata in waiting if (born := moment(metadata.get("creationTimestamp")))), default=None)


def require_sizes(manifest: Mapping[str, Any], min_nodes: int, nodes: int | None) -> None:
    """
    :param nodes: how many the manifest asks for, if it says.
    :raises ManifestError: if the job cannot be started again with as few as `min_nodes`.
    """
    job = f"job {mapping(manifest.get('metadata')).get('name')}"
    if mapping(manifest.get("spec")).get("elasticPolicy"):
        raise ManifestError(
            job, "it is elastic in place, and `min_nodes` is for jobs that are not", "Remove one of them"
        )
    resized(manifest, min_nodes)
    if nodes is not None and min_nodes > nodes:
        raise ManifestError(job, f"it has {nodes} nodes, and min_nodes is {min_nodes}", "Make min_nodes smaller")


def is_up(pod: Mapping[str, Any]) -> bool:
    """Whether a container of the pod runs; the phase says Running of one that waits for its next start, too."""
    return any("running" in mapping(item.get("state")) for item in _containers(pod))


def is_away(pod: Mapping[str, Any]) -> bool:
    """Whether the pod ran before and will again."""
    return any(
        (whole(item.get("restartCount")) or item.get("lastState") or mapping(item.get("state")).get("terminated"))
        and "running" not in mapping(item.get("state"))
        for item in _containers(pod)
    )


def unproven(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str | None:
    """Why the success that the backend tells does not count; None if it does. Never raises.

    The training operator takes the first worker that ends with 0 for the success of an elastic job without a master.
    A job with `SUCCESS_ANNOTATION` is done when a pod that ended with 0
    left the termination message `{"exit_code": 0, "rank": 0, ...}`.
    """
    annotations = mapping(mapping(job.get("metadata")).get("annotations"))
    if annotations.get(SUCCESS_ANNOTATION) != RANK_0_REPORTS or any(_reports(pod) for pod in pods):
        return None
    return "A worker ended well, but rank 0 has not reported that the run is done"


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return items(mapping(pod.get("status")).get("containerStatuses"))


def _reports(pod: Mapping[str, Any]) -> bool:
    for container in _containers(pod):
        terminated = mapping(mapping(container.get("state")).get("terminated"))
        if terminated.get("exitCode") != 0:
            continue
        try:
            told = mapping(json.loads(str(terminated.get("message") or "")))
        except (ValueError, RecursionError):
            continue
        if (told.get("exit_code"), told.get("rank")) == (0, 0) and told["rank"] is not False:
            return True
    return False


def _is_over(pod: Mapping[str, Any]) -> bool:
    ended = mapping(pod.get("status")).get("phase") in ("Succeeded", "Failed")
    return ended or bool(mapping(pod.get("metadata")).get("deletionTimestamp"))


def _has_place(pod: Mapping[str, Any]) -> bool:
    status = mapping(pod.get("status"))
    if _is_over(pod):
        return False
    if mapping(pod.get("spec")).get("nodeName"):
        return True
    return any(item.get("reason") == FITS_REASON for item in items(status.get("conditions")))


def _pods(replicas: Mapping[str, Any]) -> int:
    return sum(max(0, whole(mapping(item).get("replicas", 1)) or 0) for item in replicas.values())
