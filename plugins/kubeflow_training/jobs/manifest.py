"""The one builder of PyTorchJob manifests (kubeflow.org/v1): a pure function of plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

API_VERSION: Final = "kubeflow.org/v1"
KIND: Final = "PyTorchJob"
CONTAINER: Final = "pytorch"
"""The admission webhook wants a container of this name in every template."""
DEFAULT_GRACE_SECONDS: Final = 30

# What the Airflow operator writes on a job so that it can be recognised again.
FINGERPRINT_ANNOTATION: Final = "kubeflow-training/fingerprint"
GANG_ANNOTATION: Final = "kubeflow-training/gang"
OWNER_ANNOTATION: Final = "kubeflow-training/owner"
CHAIN_ANNOTATION: Final = "kubeflow-training/chain"

JOB_NAME_LABEL: Final = "training.kubeflow.org/job-name"
REPLICA_TYPE_LABEL: Final = "training.kubeflow.org/replica-type"
REPLICA_INDEX_LABEL: Final = "training.kubeflow.org/replica-index"


def pytorch_job(
    *,
    name: str,
    image: str,
    command: Sequence[str],
    namespace: str = "default",
    args: Sequence[str] = (),
    nodes: int = 1,
    processes_per_node: int = 1,
    cpus: float = 1,
    memory_gb: float = 2,
    gpus: int = 0,
    gpu_resource: str = "nvidia.com/gpu",
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    grace_seconds: int = DEFAULT_GRACE_SECONDS,
    deadline_seconds: int | None = None,
    ttl_seconds: int | None = 7 * 24 * 3600,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] = (),
    service_account: str | None = None,
    priority_class: str | None = None,
    queue: str | None = None,
    shm_gb: float | None = None,
) -> dict[str, Any]:
    """The manifest of one gang: `nodes` pods, of which the first is the master.

    :param command: container command; the same on every pod.
    :param nodes: pods; zero workers means no `Worker` key, which the webhook would refuse.
    :param processes_per_node: processes that torchrun starts in each pod.
    :param cpus, memory_gb, gpus: what each pod asks for and may use (GB = 10^9 bytes).
    :param secrets: names of Kubernetes secrets whose keys become environment variables; never their content.
    :param grace_seconds: from SIGTERM to SIGKILL; longer than one step and one save.
    :param deadline_seconds: limit of the running time, queueing not counted.
    :param ttl_seconds: when Kubernetes may remove the finished job by itself.
    :param queue: Kueue's local queue; the job then starts suspended and Kueue admits it.
    :param shm_gb: size of the memory-backed /dev/shm; half of the memory unless given.
    """
    resources: dict[str, Any] = {"cpu": _quantity(cpus), "memory": f"{round(memory_gb * 1000)}M"}
    if gpus:
        resources[gpu_resource] = str(gpus)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in sorted((env or {}).items())],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - the mount, not a temporary file
    }
    if args:
        container["args"] = list(args)
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in secrets]
    shm = round((shm_gb if shm_gb is not None else memory_gb / 2) * 1000)
    pod: dict[str, Any] = {
        "containers": [container],
        "terminationGracePeriodSeconds": grace_seconds,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}M"}}],
    }
    if node_selector:
        pod["nodeSelector"] = dict(node_selector)
    if tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in tolerations]
    if service_account:
        pod["serviceAccountName"] = service_account
    if priority_class:
        pod["priorityClassName"] = priority_class
    # A service mesh's side-car outlives the training container and the pod would never end.
    template = {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod}

    # Ended pods of a finished job stay, for their logs and exit codes; running ones are ended with it.
    policy: dict[str, Any] = {"cleanPodPolicy": "Running"}
    if deadline_seconds is not None:
        policy["activeDeadlineSeconds"] = deadline_seconds
    if ttl_seconds is not None:
        policy["ttlSecondsAfterFinished"] = ttl_seconds
    all_labels = dict(labels or {})
    if queue:
        all_labels["kueue.x-k8s.io/queue-name"] = queue
        policy["suspend"] = True
    replicas = {"Master": _replica(1, template)}
    if nodes > 1:
        replicas["Worker"] = _replica(nodes - 1, template)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": all_labels,
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "nprocPerNode": str(processes_per_node),
            "runPolicy": policy,
            "pytorchReplicaSpecs": replicas,
        },
    }


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over what makes this job this job: name, namespace and spec; labels and annotations do not count."""
    metadata = manifest.get("metadata") or {}
    content = [metadata.get("name"), metadata.get("namespace"), manifest.get("spec")]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _replica(count: int, template: Mapping[str, Any]) -> dict[str, Any]:
    # Never: a gang that lost one rank is of no use, and the operator's backoffLimit is no reliable budget.
    return {"replicas": count, "restartPolicy": "Never", "template": json.loads(json.dumps(template))}


def _quantity(cpus: float) -> str:
    return str(int(cpus)) if float(cpus).is_integer() else f"{round(cpus * 1000)}m"
