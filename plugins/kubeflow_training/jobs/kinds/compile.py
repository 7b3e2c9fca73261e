"""From one description to each kind: a PyTorchJob's manifest as a TrainJob or as a plain indexed Job. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.kinds.indexed import INDEXED_JOB
from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.kinds.pytorch import PYTORCH_JOB
from kubeflow_training.jobs.kinds.train import MANAGER, NODE, TRAIN_JOB, patched_pod
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.words import CONTAINER, JOB_NAME_LABEL
from kubeflow_training.jobs.shapes import items, mapping

RUNTIME: Final = "torch-distributed"
"""The runtime that Kubeflow Trainer brings along."""
_WEEK: Final = 7 * 24 * 3600
_GROUP: Final = "kueue.x-k8s.io/podset-group-name"
"""By which Kueue puts a job's two groups of pods into one place."""
PORT: Final = "23456"
"""Where rank 0 listens: the training operator's own choice."""
_RESERVED: Final = frozenset(
    {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
)
_PATCHED: Final = frozenset(
    {"volumes", "nodeSelector", "affinity", "tolerations", "terminationGracePeriodSeconds", "serviceAccountName",
     "imagePullSecrets", "securityContext", "schedulingGates"}
)  # fmt: skip
_TRAINER: Final = frozenset({"name", "image", "command", "args", "env", "resources", "volumeMounts", "securityContext"})
# These have their own place, or are the runtime's with a default that our runtime shares.
_ELSEWHERE: Final = frozenset({"containers", "initContainers", "topologySpreadConstraints", "restartPolicy"})
_RUNTIMES_OWN: Final = frozenset({"terminationMessagePolicy", "imagePullPolicy"})


def train_job(
    *, runtime: str = RUNTIME, runtime_kind: str = "ClusterTrainingRuntime", **arguments: Any
) -> dict[str, Any]:
    """A TrainJob from the arguments of `pytorch_job`; see `compiled`.

    :param runtime, runtime_kind: of Kubeflow Trainer 2.2 or newer.
    """
    return compiled(pytorch_job(**arguments), TRAIN_JOB, runtime=runtime, runtime_kind=runtime_kind)


def indexed_job(**arguments: Any) -> dict[str, Any]:
    """A plain indexed Job from the arguments of `pytorch_job`; see `compiled`."""
    return compiled(pytorch_job(**arguments), INDEXED_JOB)


def compiled(
    manifest: Mapping[str, Any],
    kind: Kind,
    *,
    runtime: str | Mapping[str, Any] = RUNTIME,
    runtime_kind: str = "ClusterTrainingRuntime",
) -> dict[str, Any]:
    """The PyTorchJob as a job of another kind, with the same name, pods, limits and queue.

    A TrainJob takes from its runtime what it cannot say itself: whether pods are restarted, how long it is kept, and
    the messages of its container. `training_runtime` makes one that behaves as a PyTorchJob of this library does.

    :param manifest: a PyTorchJob.
    :param kind: what to make of it.
    :param runtime, runtime_kind: of a TrainJob (Kubeflow Trainer 2.2 or newer); with the runtime's whole manifest the
        job may also have what the runtime says.
    :raises ManifestError: if the kind cannot say something that the PyTorchJob says.
    """
    PYTORCH_JOB.require_valid(manifest)
    source: dict[str, Any] = json.loads(json.dumps(dict(manifest)))
    if kind is PYTORCH_JOB:
        return source
    name = source["metadata"]["name"]
    if source["spec"].get("elasticPolicy") or "Master" not in source["spec"]["pytorchReplicaSpecs"]:
        raise ManifestError(f"{kind.name} {name}", "only a PyTorchJob can be elastic", "Leave out the elastic policy")
    if kind is TRAIN_JOB:
        return _train_job(source, runtime, runtime_kind)
    return _indexed_job(source)


def training_runtime(
    name: str,
    namespace: str | None = None,
    *,
    ttl_seconds: int | None = _WEEK,
    secrets: Sequence[str] = (),
    pod: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A runtime whose gangs end whole when a rank fails, as an administrator installs it once.

    :param name: of the runtime.
    :param namespace: of a TrainingRuntime; without it, it is a ClusterTrainingRuntime.
    :param ttl_seconds: when Kubernetes may remove the pods of a finished job.
    :param secrets: whose keys become variables of every pod, as `TrainingJobSpec.secrets` do.
    :param pod: what else its pods have that a TrainJob cannot say, such as `priorityClassName`.
    """
    container: dict[str, Any] = {"name": NODE, "image": "none", "terminationMessagePolicy": "FallbackToLogsOnError"}
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in secrets]
    job = {
        "backoffLimit": 0,
        "template": {
            "metadata": _APART,
            "spec": {**(pod or {}), "restartPolicy": "Never", "containers": [container]},
        },
    }
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    spec: dict[str, Any] = {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODE, "template": {"metadata": step, "spec": job}}],
    }
    if ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = ttl_seconds
    metadata: dict[str, Any] = {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}}
    return {
        "apiVersion": TRAIN_JOB.api_version,
        "kind": "TrainingRuntime" if namespace else "ClusterTrainingRuntime",
        "metadata": {**metadata, **({"namespace": namespace} if namespace else {})},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": spec}},
    }


_APART: Final = {"annotations": {"sidecar.istio.io/inject": "false"}}


def _train_job(source: dict[str, Any], runtime: str | Mapping[str, Any], runtime_kind: str) -> dict[str, Any]:
    name, spec, policy, nodes, template = _parts(source)
    pod = mapping(template.get("spec"))
    container = _training(pod)
    runs, runner = _said(runtime)
    reference = {"apiGroup": TRAIN_JOB.group, "kind": runtime_kind, "name": runtime}
    if not isinstance(runtime, str):
        reference |= {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    unsaid = [key for key in sorted(set(pod) - _PATCHED - _ELSEWHERE) if runs.get(key) != pod[key]]
    more = sorted(set(container) - _TRAINER - _RUNTIMES_OWN)
    unsaid += [f"containers.{key}" for key in more if runner.get(key) != container[key]]
    unsaid += [f"initContainers.{item.get('name')}" for item in items(pod.get("initContainers"))]
    unsaid += [f"containers.{item.get('name')}" for item in items(pod.get("containers")) if item is not container]
    if unsaid:
        mend = f"Put it into the runtime that `runtime` names, or use a {PYTORCH_JOB.name}"
        raise ManifestError(f"TrainJob {name}", f"it cannot say {', '.join(unsaid)}", mend)
    # What the runtime says too is not said again: Kueue, as it starts a job, drops fields that it does not know.
    patch: dict[str, Any] = {key: pod[key] for key in sorted(_PATCHED & set(pod)) if runs.get(key) != pod[key]}
    if apart := _apart(pod, TRAIN_JOB):
        patch["affinity"] = apart
    first, *more_mounts = _apart_by_volume(items(container.get("volumeMounts"))) or [[]]
    own = {"volumeMounts": first, "securityContext": container.get("securityContext")}
    if any(own.values()):
        patch["containers"] = [{"name": NODE, **{key: value for key, value in own.items() if value}}]
    env = [item for item in items(container.get("env")) if item.get("name") not in _RESERVED]
    trainer: dict[str, Any] = {
        "image": container.get("image"),
        "command": container.get("command"),
        "args": container.get("args"),
        "env": env,
        "numNodes": nodes,
        "resourcesPerNode": container.get("resources"),
    }
    if str(spec.get("nprocPerNode") or "").isdecimal():
        trainer["numProcPerNode"] = int(spec["nprocPerNode"])
    made = {
        "apiVersion": TRAIN_JOB.api_version,
        "kind": TRAIN_JOB.name,
        "metadata": source["metadata"],
        "spec": {
            "runtimeRef": reference,
            "trainer": {key: value for key, value in trainer.items() if value},
        },
    }
    for key in ("suspend", "activeDeadlineSeconds"):
        if key in policy:
            made["spec"][key] = policy[key]
    TRAIN_JOB.pod_specs(made)[0].update(patch)
    for number, mounts in enumerate(more_mounts, 2):
        patched_pod(made, f"{MANAGER}-{number}")["containers"] = [{"name": NODE, "volumeMounts": mounts}]
    if metadata := mapping(template.get("metadata")):
        job = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        job["template"]["spec"]["template"]["metadata"] = metadata
    return made


def _apart_by_volume(mounts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Lists in which no volume is mounted twice: one patch of a runtime can have a volume once, the next again."""
    found: list[list[Mapping[str, Any]]] = []
    for mount in mounts:
        free = next((one for one in found if mount.get("name") not in [other.get("name") for other in one]), None)
        if free is None:
            found.append(free := [])
        free.append(mount)
    return found


def _said(runtime: str | Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a runtime says of its pods, and of their container; nothing where only its name is known."""
    if isinstance(runtime, str):
        return {}, {}
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = group["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def _indexed_job(source: dict[str, Any]) -> dict[str, Any]:
    name, spec, policy, nodes, template = _parts(source)
    pod, label = template["spec"], INDEXED_JOB.job_label
    pod |= {"restartPolicy": "Never", "subdomain": name}
    for constraint in items(pod.get("topologySpreadConstraints")):
        _relabel(constraint, label)
    for rule in items(mapping(mapping(pod.get("affinity")).get("podAntiAffinity")).get(_REQUIRED)):
        _relabel(rule, label)
    processes = str(spec.get("nprocPerNode") or "1")
    rank = _from("metadata.labels['batch.kubernetes.io/job-completion-index']")
    env: dict[str, Any] = {
        "JOB_NAME": _from(f"metadata.labels['{label}']"),
        # torch's store asks for this name until the join timeout; it comes with the first pod.
        "MASTER_ADDR": "$(JOB_NAME)-0.$(JOB_NAME)",
        "MASTER_PORT": PORT,
        "RANK": rank,
        "WORLD_SIZE": str(nodes * (int(processes) if processes.isdecimal() else 1)),
        "PYTHONUNBUFFERED": "1",
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": processes,
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": "$(MASTER_ADDR)",
        "PET_MASTER_PORT": PORT,
    }
    _add_env(_training(pod), env)
    made: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # A gang that lost one rank is of no use: the first failure ends it whole.
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "template": template,
    }
    for key in ("suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if key in policy:
            made[key] = policy[key]
    template.setdefault("metadata", {})
    return {
        "apiVersion": INDEXED_JOB.api_version,
        "kind": INDEXED_JOB.name,
        "metadata": source["metadata"],
        "spec": made,
    }


_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def _parts(source: dict[str, Any]) -> tuple[str, dict[str, Any], Mapping[str, Any], int, dict[str, Any]]:
    """Name, spec, run policy, number of pods, and the master's pod template."""
    spec = source["spec"]
    policy = mapping(spec.get("runPolicy"))
    if policy.get("schedulingPolicy"):
        mend = "Leave out schedulingPolicy, or use Kueue's queue"
        raise ManifestError(
            f"job {source['metadata']['name']}", "only a PyTorchJob has a gang scheduler's policy", mend
        )
    template: dict[str, Any] = spec["pytorchReplicaSpecs"]["Master"]["template"]
    notes = mapping(template.get("metadata")).get("annotations")
    if isinstance(notes, dict):
        notes.pop(_GROUP, None)  # there is one group of pods now, which Kueue would refuse to join
    return source["metadata"]["name"], spec, policy, PYTORCH_JOB.wanted(source) or 1, template


def _training(pod: Mapping[str, Any]) -> Any:
    return next(item for item in pod["containers"] if item.get("name") == CONTAINER)


def _apart(pod: Mapping[str, Any], kind: Kind) -> dict[str, Any] | None:
    """The pod's affinity, with its wish for different nodes in the only words that a TrainJob has for it."""
    affinity = json.loads(json.dumps(mapping(pod.get("affinity"))))
    rules = mapping(affinity.get("podAntiAffinity"))
    for rule in items(rules.get(_REQUIRED)):
        _relabel(rule, kind.job_label)
    terms = []
    for constraint in items(pod.get("topologySpreadConstraints")):
        _relabel(constraint, kind.job_label)
        term = {"labelSelector": constraint.get("labelSelector"), "topologyKey": constraint.get("topologyKey")}
        terms.append({"weight": 100, "podAffinityTerm": term})
    if terms:
        affinity["podAntiAffinity"] = {**rules, _PREFERRED: [*items(rules.get(_PREFERRED)), *terms]}
    return affinity or None


def _relabel(rule: Mapping[str, Any], label: str) -> None:
    """Let a rule about the pods of this job name them by the label that the kind gives them."""
    match = mapping(rule.get("labelSelector")).get("matchLabels")
    if isinstance(match, dict) and JOB_NAME_LABEL in match:
        match[label] = match.pop(JOB_NAME_LABEL)


def _add_env(container: Any, values: Mapping[str, Any]) -> None:
    """What the training operator would add, before the manifest's own variables, which may use and replace it."""
    given = items(container.get("env"))
    names = {item.get("name") for item in given}
    more = [
        {"name": key, **({"value": value} if isinstance(value, str) else {"valueFrom": value})}
        for key, value in values.items()
        if key not in names
    ]
    container["env"] = [*more, *given]


def _from(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}
