"""What a training job is, in typed words: `TrainingJobSpec`, and the PyTorchJob it comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from kubeflow_training.jobs.elastic import elastic
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.manifest.rights import container_rights, pod_rights
from kubeflow_training.jobs.manifest.values import checked, default_of
from kubeflow_training.jobs.manifest.words import (
    API_VERSION,
    AWAIT_MASTER,
    CONTAINER,
    DEFAULT_GRACE_SECONDS,
    JOB_NAME_LABEL,
    KIND,
    MLFLOW_RUN_ANNOTATION,
)

JOIN_SECONDS: Final = 20 * 60
"""How long ranks wait for one another: longer than a node's start and the pull of a large image."""
_WEEK: Final = 7 * 24 * 3600
_SHM: Final = "/dev/shm"  # noqa: S108 - the mount, not a temporary file
# Cluster DNS remembers a name that is not there yet for up to 30 s: a first look too early costs more than 3 s.
_AWAIT: Final = (
    "end=$(($(date +%s) + {seconds})); sleep 3; "
    'until getent hosts "$MASTER" >/dev/null 2>&1 || nslookup "$MASTER" 2>/dev/null | grep -q "^Name:"; do '
    'if [ "$(date +%s)" -ge "$end" ]; then echo "$MASTER did not come within {seconds} seconds"; exit 1; fi; '
    "sleep 1; done"
)

Spread = Literal["spread", "one_per_node", "any"]


@dataclass(frozen=True, kw_only=True)
class ElasticPolicy:
    """A job that continues with fewer nodes; see `jobs.elastic.elastic` for what becomes of it.

    :param min_nodes, max_nodes: how few and how many pods can train; `max_nodes` is the spec's `nodes` unless given.
    :param restarts: of pods, in total, before the job fails.
    :param group_restarts: of the ranks by torchrun after one of them failed.
    :param rendezvous: settings of torch's c10d rendezvous.
    """

    min_nodes: int
    max_nodes: int | None = None
    restarts: int = 10
    group_restarts: int = 100
    rendezvous: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingJobSpec:
    """One training job: `nodes` pods with the same container, of which the first is the master.

    :param name, namespace: of the job; the operator makes a name from DAG, run and task if it is left out.
    :param image, image_pull_policy, image_pull_secrets: the container's image, and how to get it.
    :param command, args: of the container, the same on every pod; a list, never a shell's line.
    :param nodes: pods.
    :param processes_per_node: ranks that torchrun starts in each pod; one per GPU unless given.
    :param cpus, memory_gb, gpus: what each pod asks for and may use (GB = 10^9 bytes).
    :param gpu_resource: by which name Kubernetes knows the GPUs.
    :param resources: more of that, by the names of Kubernetes.
    :param requests: more that each pod asks for, and is not held to.
    :param env: environment variables; never secrets.
    :param secrets: names of Kubernetes secrets whose keys become environment variables; never their content.
    :param shm_gb: size of the memory-backed /dev/shm, a part of `memory_gb`; half of it unless given.
    :param volumes, mounts: of Kubernetes: the pod's `volumes` and the container's `volumeMounts`.
    :param elastic: makes the job elastic; `nodes` is then how many pods it asks for.
    :param restart_policy: "Never" unless elastic, and then "OnFailure".
    :param grace_seconds: from SIGTERM to SIGKILL; longer than one step and one save.
    :param join_timeout_seconds: how long ranks wait for one another.
    :param deadline_seconds: limit of the running time, queueing not counted.
    :param ttl_seconds: when Kubernetes may remove the finished job by itself; None for never.
    :param clean_pod_policy: which pods go when the job ends: "Running", "All" or "None".
    :param backoff_limit: how often the training operator restarts containers; no reliable budget.
    :param suspend: create the job suspended; so it is with a `queue`, until Kueue admits it.
    :param scheduling: `schedulingPolicy` of a gang scheduler (minAvailable, queue, minResources, ...).
    :param queue, queue_priority: Kueue's local queue and WorkloadPriorityClass.
    :param priority_class: the pods' PriorityClass.
    :param node_selector, tolerations, affinity: the pods'.
    :param spread: pods prefer different nodes ("spread"), get them or wait ("one_per_node"), or come anywhere ("any").
    :param labels, annotations: of the job.
    :param pod_labels, pod_annotations, service_account: of its pods.
    :param runtime, runtime_kind: of a TrainJob; Kubeflow Trainer's own `torch-distributed` unless given.
    :param mlflow_run: id of the job's MLflow run, for the task's link; becomes an annotation.
    :param user: uid that the pods run as, held to Kubernetes' restricted Pod Security Standard; volumes are given to
        its group where they can be. None leaves user and rights to the image.
    :param mesh: let a service mesh inject its side-car, which outlives the training container: the pod may never end.
    :param pod: anything else of the pod's spec; what is given here is laid over all of the above.
    """

    image: str
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    name: str = ""
    namespace: str = "default"
    nodes: int = 1
    processes_per_node: int | str | None = None
    cpus: float = 1
    memory_gb: float = 2
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, str | int | float] | None = None
    requests: Mapping[str, str | int | float] | None = None
    env: Mapping[str, str] | None = None
    secrets: Sequence[str] = ()
    shm_gb: float | None = None
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    elastic: ElasticPolicy | None = None
    restart_policy: str | None = None
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    join_timeout_seconds: int = JOIN_SECONDS
    deadline_seconds: int | None = None
    ttl_seconds: int | None = _WEEK
    clean_pod_policy: str = "Running"
    backoff_limit: int | None = None
    suspend: bool | None = None
    scheduling: Mapping[str, Any] | None = None
    queue: str | None = None
    queue_priority: str | None = None
    priority_class: str | None = None
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] = ()
    affinity: Mapping[str, Any] | None = None
    spread: Spread = "spread"
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    pod_labels: Mapping[str, str] | None = None
    pod_annotations: Mapping[str, str] | None = None
    service_account: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Sequence[str] = ()
    runtime: str | None = None
    runtime_kind: str = "ClusterTrainingRuntime"
    mlflow_run: str | None = None
    user: int | None = None
    mesh: bool = False
    pod: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is as it is anyway."""
        values = asdict(self)
        return {item.name: values[item.name] for item in fields(self) if values[item.name] != default_of(item)}

    @classmethod
    def from_dict(cls, data: Any) -> TrainingJobSpec:
        """The inverse of `to_dict`; numbers may be text, as templates make them.

        :raises ManifestError: for a name that is none, with the nearest, and for a value of a wrong type.
        """
        values = checked("the job's spec", cls, data)
        if isinstance(values.get("elastic"), Mapping):
            values["elastic"] = ElasticPolicy(**checked("elastic", ElasticPolicy, values["elastic"]))
        return cls(**values)

    def manifest(self) -> dict[str, Any]:
        """The PyTorchJob: plain values, the same for the same spec.

        :raises ManifestError: if the spec names a runtime, which only a TrainJob has.
        """
        if self.runtime is not None:
            mend = "Give the operator kind='TrainJob', or leave out `runtime`"
            raise ManifestError("the job's spec", f"only a TrainJob has a runtime, such as {self.runtime!r}", mend)
        policy = {
            # Ended pods of a finished job stay, for their logs and exit codes; running ones are ended with it.
            "cleanPodPolicy": self.clean_pod_policy,
            "activeDeadlineSeconds": self.deadline_seconds,
            "ttlSecondsAfterFinished": self.ttl_seconds,
            "backoffLimit": self.backoff_limit,
            "suspend": True if self.queue and self.suspend is None else self.suspend,
            "schedulingPolicy": dict(self.scheduling) if self.scheduling else None,
        }
        spec: dict[str, Any] = {
            "nprocPerNode": str(self.processes_per_node if self.processes_per_node is not None else self.gpus or 1),
            "runPolicy": {key: value for key, value in policy.items() if value is not None},
        }
        # No workers means no `Worker` key: the webhook refuses zero replicas.
        spec["pytorchReplicaSpecs"] = replicas = {"Master": self._replica(1, wait=False)}
        if self.nodes > 1:
            replicas["Worker"] = self._replica(self.nodes - 1, wait=self.join_timeout_seconds > 0)
        kueue = {"kueue.x-k8s.io/queue-name": self.queue, "kueue.x-k8s.io/priority-class": self.queue_priority}
        run = {MLFLOW_RUN_ANNOTATION: self.mlflow_run}
        metadata = {
            "name": self.name,
            "namespace": self.namespace,
            "labels": {**(self.labels or {}), **{key: value for key, value in kueue.items() if value}},
            "annotations": {**(self.annotations or {}), **{key: value for key, value in run.items() if value}},
        }
        # A copy without shared parts: whoever changes one replica must not change the other.
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
        found: dict[str, Any] = json.loads(json.dumps(manifest))
        if self.elastic is None:
            return found
        rendezvous = {"join_timeout": str(self.join_timeout_seconds), **(self.elastic.rendezvous or {})}
        found = elastic(found, **{**asdict(self.elastic), "rendezvous": rendezvous})
        if self.restart_policy:
            found["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = self.restart_policy
        return found

    def _replica(self, count: int, *, wait: bool) -> dict[str, Any]:
        # Never: a gang that lost one rank is of no use, and the operator's backoffLimit is no reliable budget.
        policy = self.restart_policy or "Never"
        annotations = dict(self.pod_annotations or {})
        labels = dict(self.pod_labels or {})
        if not self.mesh:
            annotations = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"} | annotations
            labels = {"sidecar.istio.io/inject": "false"} | labels
        metadata = {key: value for key, value in (("labels", labels), ("annotations", annotations)) if value}
        template = {"metadata": metadata, "spec": _overlaid(self._pod(wait=wait), self.pod)}
        return {"replicas": count, "restartPolicy": policy, "template": template}

    def _pod(self, *, wait: bool) -> dict[str, Any]:
        volumes, mounts = [dict(item) for item in self.volumes], [dict(item) for item in self.mounts]
        if not any(item.get("mountPath") == _SHM for item in mounts):
            shm = round((self.shm_gb if self.shm_gb is not None else self.memory_gb / 2) * 1000)
            volumes.insert(0, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}M"}})
            mounts.insert(0, {"name": "shm", "mountPath": _SHM})
        pod: dict[str, Any] = {
            "containers": [self._container(mounts)],
            "initContainers": [self._await_master()] if wait else None,
            "terminationGracePeriodSeconds": self.grace_seconds,
            "volumes": volumes,
            "nodeSelector": dict(self.node_selector or {}),
            "tolerations": [dict(item) for item in self.tolerations],
            "affinity": dict(self.affinity or {}),
            "serviceAccountName": self.service_account,
            "securityContext": pod_rights(self.user),
            "priorityClassName": self.priority_class,
            "imagePullSecrets": [{"name": name} for name in self.image_pull_secrets],
        }
        if self.nodes > 1 and self.spread != "any":
            _spread(pod, self.name, required=self.spread == "one_per_node")
        return {key: value for key, value in pod.items() if value not in (None, {}, []) or key == "volumes"}

    def _container(self, mounts: list[dict[str, Any]]) -> dict[str, Any]:
        env = {**(self.env or {})}
        if not self.elastic and self.nodes > 1 and self.join_timeout_seconds > 0:
            # torchrun's own patience is 10 minutes; the operator sets this variable for elastic jobs alone.
            env.setdefault("PET_RDZV_CONF", f"timeout={self.join_timeout_seconds}")
        resources: dict[str, str] = {"cpu": _cpus(self.cpus), "memory": f"{round(self.memory_gb * 1000)}M"}
        if self.gpus:
            resources[self.gpu_resource] = str(self.gpus)
        resources |= _texts(self.resources)
        container = {
            "name": CONTAINER,
            "image": self.image,
            "imagePullPolicy": self.image_pull_policy,
            "command": list(self.command),
            "args": list(self.args),
            "env": [{"name": key, "value": value} for key, value in sorted(env.items())],
            "envFrom": [{"secretRef": {"name": secret}} for secret in self.secrets],
            "resources": {"requests": _texts(self.requests) | resources, "limits": dict(resources)},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
            "securityContext": container_rights(self.user),
        }
        return {key: value for key, value in container.items() if value not in (None, [], {}) or key == "env"}

    def _await_master(self) -> dict[str, Any]:
        """Waits for the master's name before the operator's own init container, which has less patience."""
        resources = {"cpu": "50m", "memory": "32M"}
        label = f"metadata.labels['{JOB_NAME_LABEL}']"
        wait = {
            "name": AWAIT_MASTER,
            "image": self.image,
            "imagePullPolicy": self.image_pull_policy,
            "command": ["sh", "-c", _AWAIT.format(seconds=self.join_timeout_seconds)],
            "env": [
                {"name": "JOB_NAME", "valueFrom": {"fieldRef": {"fieldPath": label}}},
                {"name": "MASTER", "value": "$(JOB_NAME)-master-0"},
            ],
            "resources": {"requests": dict(resources), "limits": dict(resources)},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": container_rights(self.user),
        }
        return {key: value for key, value in wait.items() if value not in (None, {})}


def _texts(amounts: Mapping[str, str | int | float] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (amounts or {}).items()}


def _spread(pod: dict[str, Any], name: str, *, required: bool) -> None:
    # `renamed` keeps this selector in step with the job's name.
    ours = {"labelSelector": {"matchLabels": {JOB_NAME_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    if not required:
        pod["topologySpreadConstraints"] = [{**ours, "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]
        return
    apart = dict(pod["affinity"].get("podAntiAffinity") or {})
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    pod["affinity"]["podAntiAffinity"] = {**apart, rule: [*(apart.get(rule) or []), ours]}


def _overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings are merged, anything else is replaced, None removes."""
    found = dict(base)
    for key, value in over.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = _overlaid(found[key], value)
        else:
            found[key] = value
    return found


def _cpus(cpus: float) -> str:
    return str(int(cpus)) if float(cpus).is_integer() else f"{round(cpus * 1000)}m"
