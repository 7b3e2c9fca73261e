"""`dropforge doctor --cluster`: whether a recipe's jobs could run on the cluster of the user's kubeconfig.

Nothing is changed: what cannot be read is tried by the API server's dry run. What this account may not look at is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dropforge.cli.cluster_quotas import queue_finding, quota_findings
from dropforge.cli.gangs import asking_cluster
from dropforge.cli.job_manifests import runtime_of
from dropforge.cli.kube import Cluster, DeniedError, UnknownKindError
from dropforge.cli.recipes import example_run
from dropforge.errors import DropforgeError
from dropforge.install.rights import ENFORCED
from dropforge.job import (
    RUNTIME,
    SECRET,
    Served,
    job_kind,
    runtime_command,
    tokenise_job,
    train_job,
    why_no_train_job,
)
from dropforge.placement.admission import differences
from dropforge.placement.pods import EFA, TYPE
from dropforge.placement.queues import API as KUEUE
from dropforge.placement.storages import STORAGES, Kind, Storage
from dropforge.placement.teams import GPU
from dropforge.recipe import Recipe
from dropforge.recipe_spark import SparkCluster
from dropforge.stack.doctor import Finding, Level

_APART: Final = 30  # seconds between two clocks
_REASONS: Final = 3  # of different kinds, why nodes do not fit
_PODS_PAGE: Final = "docs/reference/kubeflow-training/rights.md#pods"
_WHOLE: Final = ("get", "list", "watch", "create", "delete")
#: Verbs on resources, and what is not done without them; with "" nothing is.
_RIGHTS: Final = (
    ("", "pods", ("list", "watch"), ""),
    ("", "pods/log", ("get",), ""),
    ("", "events", ("list", "create"), "it is not shown why pods wait"),
    ("", "pods", ("deletecollection",), "a deletion takes the pods' own grace period"),
    ("", "nodes", ("get",), "a broken node explains no failure"),
)
#: The same for jobs of a kind, beside those on the jobs themselves.
_KIND_RIGHTS: Final = {
    "Job": (("", "services", ("get", "create", "patch", "delete"), ""),),
    "TrainJob": (
        ("trainer.kubeflow.org", "trainingruntimes", ("get",), "`compute.kind: auto` prefers PyTorchJobs, if known"),
    ),
}
#: What brings the kinds that Kubernetes does not have itself.
_OPERATORS: Final = {
    "PyTorchJob": "the Kubeflow training operator 1.9",
    "TrainJob": "Kubeflow Trainer 2.2 or newer",
}
_QUEUE_RIGHTS: Final = (
    ("kueue.x-k8s.io", "workloads", ("list",), "a job that waits is only `queued`"),
    ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads", ("get",), "a job has no position in its queue"),
)
_SPARK_RIGHTS: Final = {
    "operator": ("sparkoperator.k8s.io", "sparkapplications", _WHOLE, ""),
    "spark-submit": ("batch", "jobs", _WHOLE, ""),
}


@dataclass(frozen=True)
class Asked:
    """What is to be run.

    :param job: its PyTorchJob. :param account: of the tasks, as NAMESPACE:NAME, whose rights are checked; else the
        user's own. :param ahead: the PyTorchJob that tokenises before it, if one does. :param kind: of the jobs that
        the cluster gets, which are made of these.
    """

    recipe: Recipe
    job: Mapping[str, Any]
    account: str = ""
    ahead: Mapping[str, Any] | None = None
    kind: str = "PyTorchJob"

    @property
    def namespace(self) -> str:
        return self.recipe.compute.namespace

    @property
    def spark(self) -> SparkCluster | None:
        """The pods that curate, if any do."""
        curation = self.recipe.curation
        return curation.spark.cluster if curation and curation.engine == "spark" and curation.spark else None

    @property
    def pod(self) -> Mapping[str, Any]:
        """Spec of the gang's first pod."""
        return _pod_of(self.job)


def _pod_of(job: Mapping[str, Any]) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return spec


def job_of(recipe: Recipe) -> dict[str, Any]:
    """The job of an example run of the recipe. :raises DropforgeError: if it trains on this machine."""
    from kubeflow_training.jobs.manifest import pytorch_job

    if recipe.compute.backend != "kubernetes":
        raise DropforgeError(
            "the recipe", "it trains on this machine", "Name one with `compute.backend: kubernetes` by --recipe"
        )
    return pytorch_job(**train_job(example_run(recipe, "doctor", "dropforge"), recipe))


def ahead_of(recipe: Recipe) -> dict[str, Any] | None:
    """The job that tokenises before that; None if its first rank does."""
    from kubeflow_training.jobs.manifest import pytorch_job

    if not recipe.compute.tokenize_ahead:
        return None
    return pytorch_job(**tokenise_job(example_run(recipe, "doctor", "dropforge"), recipe))


def examine_cluster(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    """All findings; a cluster that does not answer is the only one.

    :raises DropforgeError: never for what is wrong with the cluster.
    """
    try:
        version = cluster.get("/version") or {}
    except DropforgeError as error:
        yield Finding("cluster", Level.FAIL, error.cause, error.mend)
        return
    yield Finding("cluster", Level.OK, f"Kubernetes {version.get('gitVersion', '?')}")
    try:
        served = cluster.trains_with(asked.namespace)
        asked = replace(asked, kind=job_kind(asked.recipe.compute, lambda: served))
        yield from kind_findings(asked, served)
    except DropforgeError as error:
        yield Finding("kind of job", Level.FAIL, f"{error.thing}: {error.cause}", error.mend)
        asked = replace(asked, kind="TrainJob")  # which lacks something; what else is missing is worth knowing
    for name, check in _CHECKS:
        try:
            yield from check(cluster, asked)
        except DeniedError:
            yield Finding(name, Level.WARN, "not looked at: this account may not", "Ask again as one who may")
        except DropforgeError as error:
            yield Finding(name, Level.FAIL, error.cause, error.mend)


def kind_findings(asked: Asked, served: Served) -> Iterator[Finding]:
    """Whether the cluster knows the jobs and, of TrainJobs, has their runtime. Pure."""
    kind, why = asked.kind, "" if asked.recipe.compute.kind == "auto" else ", as `compute.kind` says"
    if kind != "TrainJob" and served.runtime and (why_not := why_no_train_job(asked.recipe.compute, served)):
        why = why or f": {why_not}"
    if kind not in served.kinds:
        mend = f"Install {_OPERATORS[kind]}, or change `compute.kind`"
        yield Finding("kind of job", Level.FAIL, f"the cluster does not know the {kind}{why}", mend)
        return
    yield Finding("kind of job", Level.OK, f"{kind}{why}")
    if kind == "TrainJob" and served.runtime is False:
        text = f"there is no TrainingRuntime {RUNTIME} in {asked.namespace}"
        yield Finding("runtime", Level.FAIL, text, runtime_command(asked.namespace))


def _namespace(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    found = cluster.get(f"/api/v1/namespaces/{asked.namespace}")
    if found is None:
        mend = f"kubectl create namespace {asked.namespace}, or set `compute.namespace`"
        yield Finding("namespace", Level.FAIL, f"there is no {asked.namespace}", mend)
        return
    enforced = (found["metadata"].get("labels") or {}).get(ENFORCED, "")
    if enforced == "restricted" and asked.kind == "PyTorchJob" and asked.recipe.compute.nodes > 1:
        text = "restricted, which refuses workers unless the training operator's container has its rights said"
        yield Finding("namespace", Level.WARN, f"{asked.namespace} enforces {text}", f"See {_PODS_PAGE}")
    elif enforced in ("", "privileged"):
        mend = f"kubectl label namespace {asked.namespace} {ENFORCED}=baseline"
        text = f"{asked.namespace} has no label that keeps pods from any right of the node"
        yield Finding("namespace", Level.WARN, text, mend)
    else:
        yield Finding("namespace", Level.OK, f"{asked.namespace}, which enforces {enforced}")


def _kinds(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    wanted = []
    if asked.recipe.compute.queue:
        wanted.append((KUEUE, "localqueues", "Kueue 0.15 or newer"))
    if asked.spark and asked.spark.submit == "operator":
        wanted.append(("sparkoperator.k8s.io/v1beta2", "sparkapplications", "the Spark operator"))
    for version, plural, owner in wanted:
        if cluster.knows(version, plural):
            yield Finding(plural, Level.OK, f"known, of {version}")
        else:
            yield Finding(plural, Level.FAIL, f"the cluster does not know them, of {version}", f"Install {owner}")


def _runtime(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    """Whether the runtime of TrainJobs is as this version has it; one that is missing is told with the kind."""
    from kubeflow_training.jobs.kinds import TRAIN_JOB

    if asked.kind != TRAIN_JOB.name:
        return
    path = f"/apis/{TRAIN_JOB.api_version}/namespaces/{asked.namespace}/trainingruntimes/{RUNTIME}"
    if (found := cluster.get(path)) and (wrong := differences(runtime_of(asked.namespace), found, str)):
        text = f"the TrainingRuntime {RUNTIME} is not as this version has it: {'; '.join(wrong)}"
        yield Finding("runtime", Level.WARN, text, runtime_command(asked.namespace))


def _rights(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    from kubeflow_training.jobs.kinds import kind_named

    whose, lacking = asked.account or "your account", False
    kind = kind_named(asked.kind)
    wanted = [
        (kind.group, kind.plural, _WHOLE, ""),
        *_RIGHTS,
        *_KIND_RIGHTS.get(kind.name, ()),
        *(_QUEUE_RIGHTS if asked.recipe.compute.queue else ()),
    ]
    if asked.spark:
        wanted.append(_SPARK_RIGHTS[asked.spark.submit])
    for group, resource, verbs, lost in wanted:
        namespace = "" if resource == "nodes" else asked.namespace
        denied = [verb for verb in verbs if not cluster.may(verb, group, resource, namespace, asked.account)]
        if denied:
            lacking = True
            text = f"{whose} may not {', '.join(denied)} {resource}{f': {lost}' if lost else ''}"
            mend = "Give the account the Roles of docs/reference/kubeflow-training/rights.md"
            yield Finding("rights", Level.WARN if lost else Level.FAIL, text, mend)
    if not lacking:
        yield Finding("rights", Level.OK, f"{whose} has all that tasks need in {asked.namespace}")


def _job(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    from kubeflow_training.jobs.kinds import kind_named
    from kubeflow_training.jobs.kinds.compile import compiled

    kind = kind_named(asked.kind)
    with asking_cluster():
        job = compiled(asked.job, kind, runtime=runtime_of(asked.namespace))
    try:
        cluster.try_out(f"/apis/{kind.api_version}/namespaces/{asked.namespace}/{kind.plural}", job)
    except UnknownKindError:
        return  # told already
    yield Finding("job", Level.OK, "the cluster and its webhooks would take it")


def _pod(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "dropforge-doctor"}, "spec": asked.pod}
    cluster.try_out(f"/api/v1/namespaces/{asked.namespace}/pods", body)
    yield Finding("pod", Level.OK, "the namespace's rules and quotas would take it")


def _quota(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    quotas = (cluster.get(f"/api/v1/namespaces/{asked.namespace}/resourcequotas") or {}).get("items") or []
    lacking = quota_findings(quotas, asked.pod, asked.recipe.compute.nodes)
    yield from lacking
    if quotas and not lacking:
        yield Finding("quota", Level.OK, "those of the namespace have room for the whole job")


def _secret(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    yield secret_finding(asked.namespace, cluster.get(f"/api/v1/namespaces/{asked.namespace}/secrets/{SECRET}"))


def secret_finding(namespace: str, found: Mapping[str, Any] | None) -> Finding:
    """Whether pods would get what they have to know. Pure."""
    # The stack of `dropforge up` knows it; an installation says it, as the plan does.
    stack = f"with a stack of `dropforge up`: dropforge secret --namespace {namespace} | kubectl apply -f -"
    if found is None:
        mend = (
            f"kubectl create secret generic {SECRET} --namespace {namespace} "
            "--from-literal MLFLOW_TRACKING_URI=ADDRESS, where pods have no roles by --from-env-file with AWS_* too "
            "(docs/how-to/install/kubernetes-special-cases.md)"
        )
        return Finding("secret", Level.FAIL, f"there is no {SECRET}, and pods would not start", f"{mend}; {stack}")
    data = found.get("data") or {}
    if "MLFLOW_TRACKING_URI" not in data:
        patch = '{"stringData": {"MLFLOW_TRACKING_URI": "ADDRESS"}}'
        mend = f"kubectl patch secret {SECRET} --namespace {namespace} --patch '{patch}'"
        text = f"{SECRET} has no MLFLOW_TRACKING_URI: metrics go nowhere"
        return Finding("secret", Level.WARN, text, f"{mend}; {stack}")
    return Finding("secret", Level.OK, f"{SECRET} names {', '.join(sorted(data))}")


def _claims(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    compute = asked.recipe.compute
    for claim in dict.fromkeys(volume.claim for volume in compute.volumes):
        found = cluster.get(f"/api/v1/namespaces/{asked.namespace}/persistentvolumeclaims/{claim}")
        mounted = [volume for volume in compute.volumes if volume.claim == claim]
        writes = any(not volume.read_only for volume in mounted)
        kind = next((volume.storage for volume in mounted if volume.storage), None)
        yield claim_finding(claim, found, nodes=compute.nodes, writes=writes, kind=kind, classes=_classes(cluster))


def _classes(cluster: Cluster) -> list[str] | None:
    """Names of the storage classes; None where this account may not look."""
    try:
        found = cluster.get("/apis/storage.k8s.io/v1/storageclasses") or {}
    except DeniedError:
        return None
    return [str(one["metadata"]["name"]) for one in found.get("items") or []]


def _lost_class(claim: Mapping[str, Any], classes: Collection[str]) -> str:
    """Why no class ever makes its volume; empty if one may, or if it names a volume."""
    spec = claim["spec"]
    its_class = spec.get("storageClassName")
    if spec.get("volumeName") or its_class in (*classes, ""):
        return ""
    if its_class is None:
        return "it names no StorageClass, and the cluster has no default one"
    return f"its StorageClass {its_class} is not there"


def claim_finding(
    claim: str,
    found: Mapping[str, Any] | None,
    *,
    nodes: int,
    writes: bool,
    kind: Kind | None = None,
    classes: Collection[str] | None = None,
) -> Finding:
    """Whether pods on so many nodes could mount it. Pure.

    :param kind: what the recipe says that it stands on. :param classes: names of the cluster's storage classes; None
        where nobody may look.
    """
    check = f"claim {claim}"
    if found is None:
        mend = "Create it (`dropforge manifests claims --recipe ...`)" if kind else "Create it"
        return Finding(check, Level.FAIL, "there is none of this name", f"{mend}, or change `compute.volumes`")
    modes = set(found["spec"].get("accessModes") or [])
    shared = modes & ({"ReadWriteMany"} if writes else {"ReadWriteMany", "ReadOnlyMany"})
    if nodes > 1 and not shared:
        need = "ReadWriteMany" if writes else "ReadOnlyMany or ReadWriteMany"
        text = f"{nodes} nodes would {'write to' if writes else 'read'} it, and its mode is {', '.join(sorted(modes))}"
        mend = f"Make one of {need}: a shared file system (docs/how-to/train-on-kubernetes.md)"
        return Finding(check, Level.FAIL, text, mend)
    if writes and modes == {"ReadOnlyMany"}:
        return Finding(check, Level.FAIL, "pods would write to it, and its mode is ReadOnlyMany", "Set `read_only`")
    if kind is not None and (other := _other_storage(found, STORAGES[kind])):
        mend = "Claim what the recipe says, or change `storage` of that volume"
        return Finding(check, Level.WARN, f"the recipe says that it is `{kind}`, and {other}", mend)
    phase = (found.get("status") or {}).get("phase")
    if phase != "Bound" and classes is not None and (lost := _lost_class(found, classes)):
        return Finding(check, Level.FAIL, lost, "Create that StorageClass, or claim one of another")
    if phase != "Bound":
        text = f"it is {phase}: it may wait for its first pod"
        return Finding(check, Level.WARN, text, f"kubectl describe pvc {claim} says what it waits for")
    return Finding(check, Level.OK, f"bound, {', '.join(sorted(modes))}")


def _other_storage(found: Mapping[str, Any], said: Storage) -> str:
    """In what a claim is not what the recipe says of it; empty if nothing speaks against it."""
    modes, its_class = found["spec"].get("accessModes") or [], found["spec"].get("storageClassName") or ""
    ours = {one.storage_class: one.kind for one in STORAGES.values() if one.storage_class}
    if ours.get(its_class, said.kind) != said.kind:
        return f"its class {its_class} makes `{ours[its_class]}`"
    if said.mode == "ReadWriteMany" and modes == ["ReadWriteOnce"]:
        return "its mode is ReadWriteOnce, that of a disk of one node"
    return ""


def _queue(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    compute = asked.recipe.compute
    if compute.queue is None:
        return
    base = f"/apis/{KUEUE}"
    mend = "dropforge queues render | kubectl apply --server-side -f - (docs/how-to/team-queues.md)"
    try:
        queue = cluster.get(f"{base}/namespaces/{asked.namespace}/localqueues/{compute.queue}")
    except UnknownKindError:
        return  # told already
    if queue is None:
        yield Finding("queue", Level.FAIL, f"there is no {compute.queue} in {asked.namespace}", mend)
    else:
        conditions = (queue.get("status") or {}).get("conditions") or []
        asleep = [one for one in conditions if one.get("type") == "Active" and one.get("status") != "True"]
        for one in asleep:
            yield Finding("queue", Level.FAIL, f"{compute.queue} admits nothing: {one.get('message')}", mend)
        if not asleep:
            waiting = (queue.get("status") or {}).get("pendingWorkloads", 0)
            yield Finding("queue", Level.OK, f"{compute.queue}, in which {waiting} wait")
        yield from _queue_quota(cluster, asked, str((queue.get("spec") or {}).get("clusterQueue")))
    if compute.priority and cluster.get(f"{base}/workloadpriorityclasses/{compute.priority}") is None:
        yield Finding("priority", Level.FAIL, f"there is no WorkloadPriorityClass {compute.priority}", mend)


def _queue_quota(cluster: Cluster, asked: Asked, name: str) -> Iterator[Finding]:
    try:
        queue = cluster.get(f"/apis/{KUEUE}/clusterqueues/{name}")
    except DeniedError:
        text = f"ClusterQueue {name} is not looked at: this account may not"
        yield Finding("queue quota", Level.WARN, text, "Ask again as one who may")
        return
    if queue and (lacking := queue_finding(queue, asked.pod, asked.recipe.compute.nodes)):
        yield lacking


def _clock(cluster: Cluster, asked: Asked) -> Iterator[Finding]:  # noqa: ARG001
    theirs = cluster.now()
    if theirs is None:
        return
    apart = theirs - time.time()
    if abs(apart) > _APART:
        text = f"this machine's is {abs(apart):.0f} s {'behind' if apart > 0 else 'ahead of'} the API server's"
        yield Finding("clock", Level.WARN, text, "Let both keep time by NTP: S3 refuses what is 15 minutes off")
    else:
        yield Finding("clock", Level.OK, "this machine's and the API server's agree")


def _nodes(cluster: Cluster, asked: Asked) -> Iterator[Finding]:
    nodes = (cluster.get("/api/v1/nodes") or {}).get("items", [])
    compute = asked.recipe.compute
    queued = compute.queue is not None
    yield from node_findings(nodes, asked.pod, pods=compute.nodes, queued=queued)
    if asked.ahead is not None:
        yield from node_findings(nodes, _pod_of(asked.ahead), pods=1, queued=queued, check="nodes to tokenise")


def node_findings(
    nodes: list[dict[str, Any]], pod: Mapping[str, Any], *, pods: int, queued: bool = False, check: str = "nodes"
) -> Iterator[Finding]:
    """Which nodes could take a pod if they were empty, and those that do not show their devices. Pure.

    :param queued: whether Kueue adds its flavors' labels and tolerations, which are not known here.
    :param check: the name of what is looked at.
    """
    (container,) = pod["containers"]
    wanted: dict[str, str] = container["resources"]["requests"]
    apart = (pod.get("affinity") or {}).get("podAntiAffinity") is not None
    why: dict[str, list[str]] = {}
    for node in nodes:
        why.setdefault(lacks(node, pod, wanted), []).append(node["metadata"]["name"])
    fitting = len(why.pop("", []))
    if fitting >= pods:
        yield Finding(check, Level.OK, f"{fitting} of {len(nodes)} have room for a pod when they are empty")
    elif fitting:
        each = ", each of which gets a node" if apart else ""
        text = f"{fitting} of {len(nodes)} have room for a pod when they are empty, and the job has {pods}{each}"
        unless = "" if apart else "several pods fit on one or "
        yield Finding(check, Level.WARN, text, f"Add nodes, unless {unless}an autoscaler adds them")
    else:
        mend = "Add such nodes, or change the recipe's `compute`; an autoscaler may add them by itself"
        most = sorted(why.items(), key=lambda item: -len(item[1]))[:_REASONS]
        told = "".join(f"; {_some(names)} {reason}" for reason, names in most)
        if queued:
            told += "; what the queue's flavors add to the pod is not known here"
        level = Level.WARN if queued else Level.FAIL
        yield Finding(check, level, f"none of {len(nodes)} has room for a pod{told}", mend)
    for resource, plugin in ((GPU, "NVIDIA's device plugin or GPU operator"), (EFA, "AWS's EFA device plugin")):
        silent = [node["metadata"]["name"] for node in nodes if resource in wanted and _should_have(node, resource)]
        if silent:
            text = f"{len(silent)} nodes show no {resource}, {silent[0]} for one"
            yield Finding(resource, Level.WARN, text, f"Install {plugin}, or look at its pod on the node")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more:"


def lacks(node: Mapping[str, Any], pod: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    """Why a node could not take a pod even if it were empty; "" if it could. Affinity is left out."""
    from kubernetes.utils.quantity import parse_quantity

    labels, has = node["metadata"].get("labels") or {}, node["status"].get("allocatable") or {}
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions") or [])
    if not ready or node["spec"].get("unschedulable"):
        return "is not ready or takes no pods"
    for key, value in (pod.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            return f"has {key}={labels.get(key, 'nothing')}, and the pod asks for {value}"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not any(
            _bears(one, taint) for one in pod.get("tolerations") or []
        ):
            return f"has the taint {taint['key']}, which the pod does not tolerate"
    for resource, amount in wanted.items():
        if parse_quantity(has.get(resource, "0")) < parse_quantity(amount):
            return f"has {has.get(resource, 'no')} {resource}, and the pod asks for {amount}"
    return ""


def _bears(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same: bool = (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))
    return same


def _should_have(node: Mapping[str, Any], resource: str) -> bool:
    """Whether a node's kind or labels say that it has such devices, and it shows none."""
    from dropforge.placement.catalogue import read

    labels = node["metadata"].get("labels") or {}
    kind = read().get(labels.get(TYPE, ""))
    if resource == GPU:
        there = labels.get("nvidia.com/gpu.present") == "true" or (kind is not None and kind.gpus > 0)
    else:
        there = kind is not None and kind.fabric == "efa" and kind.adapters > 0
    return there and str((node["status"].get("allocatable") or {}).get(resource, "0")) == "0"


_CHECKS: Final[tuple[tuple[str, Callable[[Cluster, Asked], Iterator[Finding]]], ...]] = (
    ("namespace", _namespace), ("kinds", _kinds), ("runtime", _runtime), ("rights", _rights), ("job", _job),
    ("pod", _pod), ("quota", _quota), ("secret", _secret), ("claims", _claims), ("queue", _queue), ("nodes", _nodes),
    ("clock", _clock),
)  # fmt: skip
