"""Situations that jobs get into on a real cluster: how each is brought about, and what `observe` must make of it.

The cluster tests bring the quick ones about; `record.py` does it with all and keeps the objects as fixtures.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.kinds import INDEXED_JOB, KINDS, PYTORCH_JOB, TRAIN_JOB, Kind
from kubeflow_training.jobs.kinds.compile import compiled, training_runtime
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.observation.reasons import Reason

from tests.kubeflow_training.meeting import MEET_OF_ANY_KIND

IMAGE = os.environ.get("KUBEFLOW_TRAINING_TEST_IMAGE", "test.local/shell:1")
RUNTIME = "gang"
PRETEND: dict[str, Any] = {
    "node_selector": {"type": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
}
LOST = "test.local/lost"
SLEEP = "trap 'exit 143' TERM; sleep 600 & wait"
STUBBORN = "trap '' TERM; sleep 600"


class Stage:
    """A namespace in which situations are brought about.

    :param tested: client of the account whose rights are tested; the administrator's unless given.
    """

    def __init__(self, admin: Any, namespace: str, tested: Any = None) -> None:
        from kubernetes import client

        self.namespace = namespace
        self.core, self.custom = client.CoreV1Api(admin), client.CustomObjectsApi(admin)
        self.scheduling = client.SchedulingV1Api(admin)
        self.backends = {kind.name: KubernetesCluster(tested or admin, kind) for kind in KINDS}
        self.jobs: list[tuple[Kind, str]] = []
        self._undo: list[Callable[[], Any]] = []
        self._at_end: list[Callable[[], Any]] = []
        self._made: set[str] = set()
        group = (TRAIN_JOB.group, TRAIN_JOB.version, namespace, "trainingruntimes")
        with suppress(client.ApiException):  # there may be no Trainer
            self.custom.create_namespaced_custom_object(*group, training_runtime(RUNTIME, namespace))
            pretend = training_runtime(f"{RUNTIME}-pretend", namespace)
            job = pretend["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
            job["template"]["spec"] |= {"nodeSelector": PRETEND["node_selector"], "tolerations": PRETEND["tolerations"]}
            self.custom.create_namespaced_custom_object(*group, pretend)

    def submit(self, script: str = "true", kind: Kind = PYTORCH_JOB, **more: Any) -> Job:
        """A small gang that runs a shell script on every pod.

        :param edit: changes the pod specs of the PyTorchJob before it becomes another kind.
        """
        edit: Callable[[dict[str, Any]], None] | None = more.pop("edit", None)
        name = f"job-{uuid.uuid4().hex[:6]}"
        values = {
            "name": name,
            "namespace": self.namespace,
            "image": IMAGE,
            "image_pull_policy": "IfNotPresent",
            "command": ["/bin/sh", "-c", script],
            "cpus": 0.05,
            "memory_gb": 0.03,
            "grace_seconds": 1,
            "join_timeout_seconds": 0,
            "nodes": 2,
        } | more
        manifest = pytorch_job(**values)
        for pod in PYTORCH_JOB.pod_specs(manifest):
            if edit:
                edit(pod)
        manifest = compiled(manifest, kind, runtime=RUNTIME, runtime_kind="TrainingRuntime")
        if kind is TRAIN_JOB and "queue" in more:
            # Kueue before 0.17 is built for an older Trainer: as it admits a TrainJob it drops the runtimePatches of
            # 2.2 and newer, and the JobSet refuses the change. What they say has to be in the runtime.
            del manifest["spec"]["runtimePatches"]
            manifest["spec"]["runtimeRef"]["name"] = f"{RUNTIME}-pretend"
        self.jobs.append((kind, name))
        return Job(self, kind, self.backends[kind.name].create(manifest))

    def later(self, undo: Callable[[], Any]) -> None:
        """Undo something when the situation is over."""
        self._undo.append(undo)

    def clear(self) -> None:
        """Delete the jobs and undo what was changed."""
        from kubernetes.client import ApiException

        for kind, name in self.jobs:
            self.backends[kind.name].delete(name, self.namespace, grace_seconds=0)
        for undo in reversed(self._undo):
            with suppress(ApiException):
                undo()
        self.jobs, self._undo = [], []

    def once(self, what: str, make: Callable[[], list[Callable[[], Any]]]) -> None:
        """Make something that serves all situations of this stage.

        :param make: makes it, and returns what undoes it at the stage's end.
        """
        if what not in self._made:
            self._made.add(what)
            self._at_end += make()

    def close(self) -> None:
        """Clear, and undo what served all situations."""
        self.clear()
        self._undo, self._at_end = self._at_end, []
        self.clear()

    def node(self, name: str, patch: dict[str, Any]) -> None:
        self.core.patch_node(name, patch)

    def pretend_node(self) -> str:
        """A pretend node on which nothing else runs; nothing new comes to it until `clear`."""
        found = self.core.list_node(label_selector="type=kwok").items
        busy = {pod.spec.node_name for pod in self.core.list_pod_for_all_namespaces().items}
        name: str = next(item.metadata.name for item in reversed(found) if item.metadata.name not in busy)
        taint = {"key": "test.local/reserved", "effect": "NoSchedule"}
        known = self.core.read_node(name).to_dict()["spec"].get("taints") or []
        before = [{k: v for k, v in item.items() if v and k != "time_added"} for item in known]
        before = [item for item in before if item["key"] == "kwok.x-k8s.io/node"]
        self.node(name, {"spec": {"taints": [*before, taint]}})
        self.later(lambda: self.node(name, {"spec": {"taints": before}}))
        return name


@dataclass
class Job:
    stage: Stage
    kind: Kind
    created: Snapshot
    snapshot: Snapshot | None = None

    @property
    def name(self) -> str:
        return str(self.created.job["metadata"]["name"])

    def look(self) -> Observation:
        self.snapshot = self.stage.backends[self.kind.name].read(self.name, self.stage.namespace)
        return observe(self.snapshot.job, self.snapshot.pods, self.snapshot.events) if self.snapshot else observe(None)

    def until(self, wanted: Callable[[Observation], Any], seconds: float = 150) -> Observation:
        """The first observation for which `wanted` is true."""
        end = time.monotonic() + seconds
        while not wanted(found := self.look()):
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found

    def pod(self, rank: int) -> str:
        assert self.snapshot
        pods = [pod for pod in self.snapshot.pods if self.kind.node_rank(pod, self.snapshot.job) == rank]
        return str(pods[0]["metadata"]["name"])

    def running(self) -> Observation:
        return self.until(lambda seen: seen.phase is Phase.RUNNING)


@dataclass(frozen=True)
class Situation:
    """
    :param bring: makes the situation and returns the job; the objects are kept once `observe` tells what is expected.
    :param replica, code, node: of the first failure; None if it has none. A node is any pretend one if "pretend".
    :param words: a part of the message.
    :param slow: only recorded, as it takes its time or disturbs others.
    :param after: how much later the fixture is looked at.
    :param gone: the job itself is gone, and its last events remain.
    """

    bring: Callable[[Stage], Job]
    phase: Phase
    reason: Reason | None = None
    words: str = ""
    replica: str | None = None
    code: int | None = None
    node: str | None = None
    slow: bool = False
    after: timedelta | None = None
    gone: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def fits(self, found: Observation) -> bool:
        node = "pretend" if found.node and found.node.startswith("fake-") else found.node
        return (
            (found.phase, found.reason, found.exit_code) == (self.phase, self.reason, self.code)
            and (self.replica is None or found.replica == self.replica)
            and (self.node is None or node == self.node)
            and self.words in found.message
            and all(getattr(found, key) == value for key, value in self.more.items())
        )


def _unschedulable(stage: Stage) -> Job:
    return stage.submit(nodes=1, gpus=100, **PRETEND)


def _quota(stage: Stage) -> Job:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "10m"}}}
    stage.core.create_namespaced_resource_quota(stage.namespace, quota)
    stage.later(lambda: stage.core.delete_namespaced_resource_quota("small", stage.namespace))
    end = time.monotonic() + 10
    while not stage.core.read_namespaced_resource_quota("small", stage.namespace).status.used:
        assert time.monotonic() < end
        time.sleep(0.1)
    return stage.submit(nodes=1)


def _init(stage: Stage) -> Job:
    def edit(pod: dict[str, Any]) -> None:
        command = ["/bin/sh", "-c", "echo no data at /data; exit 3"]
        pod["initContainers"] = [{**pod["containers"][0], "name": "fetch", "command": command}]

    return stage.submit(nodes=1, edit=edit)


def _kubelet_evicts(stage: Stage) -> Job:
    def edit(pod: dict[str, Any]) -> None:
        pod["volumes"] = [{"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}}]
        pod["containers"][0]["volumeMounts"] = [{"name": "scratch", "mountPath": "/scratch"}]

    return stage.submit("dd if=/dev/zero of=/scratch/x bs=1M count=8; sleep 600", nodes=1, edit=edit)


def _evicted(stage: Stage) -> Job:
    job = stage.submit(STUBBORN, grace_seconds=20)
    job.running()
    name = job.pod(1)
    body = {"metadata": {"name": name, "namespace": stage.namespace}}
    stage.core.create_namespaced_pod_eviction(name, stage.namespace, body)
    return job


def _preempted(stage: Stage, node: str | None = None) -> Job:
    """An urgent pod takes the place of a gang; what has no kubelet goes at once."""
    urgent = f"urgent-{stage.namespace}"
    stage.scheduling.create_priority_class({"metadata": {"name": urgent}, "value": 1000})
    stage.later(lambda: stage.scheduling.delete_priority_class(urgent))
    if node is None:
        # A resource that the real node has twice, so that nobody else's pods are in the way.
        node = next(n.metadata.name for n in stage.core.list_node(label_selector="type!=kwok").items)
        slots = {"status": {"capacity": {"test.local/slot": "2"}}}
        stage.core.patch_node_status(node, slots)
        stage.later(lambda: stage.core.patch_node_status(node, {"status": {"capacity": {"test.local/slot": None}}}))
        wishes: dict[str, Any] = {"gpu_resource": "test.local/slot", "gpus": 1, "grace_seconds": 20}
    else:
        wishes = {"gpus": 4, **PRETEND, "node_selector": {"kubernetes.io/hostname": node}}
        wishes["tolerations"] = [{"operator": "Exists"}]
    job = stage.submit(STUBBORN, spread="any", **wishes)
    job.running()
    stage.submit(SLEEP, nodes=1, priority_class=urgent, **wishes)
    return job


def _preempted_and_gone(stage: Stage) -> Job:
    return _preempted(stage, stage.pretend_node())


def _lost(stage: Stage, patience: int | None = None) -> Job:
    node = stage.pretend_node()
    tolerations: list[dict[str, Any]] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    tolerations += [{"key": "test.local/reserved", "operator": "Exists"}]
    if patience is not None:
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            rule = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": patience}
            tolerations.append(rule)
    place: dict[str, Any] = {"node_selector": {"kubernetes.io/hostname": node}, "tolerations": tolerations}
    job = stage.submit(SLEEP, nodes=2, **place)
    job.running()
    stage.node(node, {"metadata": {"annotations": {LOST: "true"}}})
    stage.later(lambda: stage.node(node, {"metadata": {"annotations": {LOST: None}}}))
    return job


def _silent(stage: Stage) -> Job:
    job = _lost(stage)
    # What the node controller does when a kubelet falls silent; it does not see that a pretend one did.
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": datetime.now(UTC).isoformat()}
    for rank in (0, 1):
        stage.core.patch_namespaced_pod_status(job.pod(rank), stage.namespace, {"status": {"conditions": [condition]}})
    return job


def _evicted_by_taint(stage: Stage) -> Job:
    return _lost(stage, patience=2)


def _removed(kind: Kind, **more: Any) -> Callable[[Stage], Job]:
    def bring(stage: Stage) -> Job:
        job = stage.submit(SLEEP, kind, **more)
        job.running()
        stage.core.delete_namespaced_pod(job.pod(1), stage.namespace)
        return job

    return bring


def _deleted(stage: Stage) -> Job:
    job = stage.submit(STUBBORN, grace_seconds=20)
    job.running()
    stage.backends[PYTORCH_JOB.name].delete(job.name, stage.namespace)
    return job


def _collective(stage: Stage) -> Job:
    """Rank 2 fails by itself; rank 0 ends before it says so, and rank 1 after, both because their peer is gone."""
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [10.244.1.9]:45123"
    told = json.dumps({"exit_code": 11, "message": "ValueError: row 7 of shard 3 has no text", "rank": 2})
    script = f"""case $RANK in
      0) sleep 2; echo '{lost}'; exit 1;;
      1) sleep 4; echo '{lost}'; exit 1;;
      2) sleep 3; echo Traceback; echo '{told}' > /dev/termination-log; exit 1;;
    esac"""
    return stage.submit(script, nodes=3, clean_pod_policy="None")


def _gone_with_events(kind: Kind) -> Callable[[Stage], Job]:
    def bring(stage: Stage) -> Job:
        job = stage.submit("true", kind, nodes=1, ttl_seconds=0)
        job.until(lambda _: job.snapshot is None)
        return job

    return bring


def _missing_secret(stage: Stage) -> Job:
    return stage.submit(nodes=1, secrets=["no-such-secret"])


def _missing_volume(stage: Stage) -> Job:
    volume = {"name": "v", "secret": {"secretName": "no-such-secret"}}
    return stage.submit(nodes=1, volumes=[volume], mounts=[{"name": "v", "mountPath": "/v"}])


def _crash_loop(stage: Stage) -> Job:
    return stage.submit("exit 7", nodes=1, restart_policy="OnFailure", backoff_limit=5)


def _gang(kind: Kind, script: str, **more: Any) -> Callable[[Stage], Job]:
    return lambda stage: stage.submit(script, kind, **more)


def _pretend_end(code: int, reason: str) -> dict[str, Any]:
    notes = {"test.local/ends-after": "1s", "test.local/exit-code": str(code), "test.local/reason": reason}
    return {**PRETEND, "pod_annotations": notes}


_BAD = 'if [ "$PET_NODE_RANK" = 1 ]; then echo shard 3 is broken; exit 11; fi; ' + SLEEP
F, Q, S, R = Phase.FAILED, Phase.QUEUED, Phase.STARTING, Phase.RUNNING

SITUATIONS: dict[str, Situation] = {
    "image": Situation(
        lambda stage: stage.submit(nodes=1, image="test.local/none:1"),
        F, Reason.IMAGE, "test.local/none:1", "master-0", slow=True,
    ),
    "unschedulable": Situation(_unschedulable, Q, Reason.UNSCHEDULABLE, "Insufficient nvidia.com/gpu"),
    "quota": Situation(_quota, Q, Reason.QUOTA, "exceeded quota: small"),
    "init-container": Situation(
        _init, F, Reason.UNKNOWN, "in init container fetch with exit code 3: no data at /data", "master-0", 3, "node-1"
    ),
    "out-of-memory": Situation(
        _gang(PYTORCH_JOB, "tail /dev/zero", nodes=1), F, Reason.OUT_OF_MEMORY, "exit code 137", "master-0", 137
    ),
    "out-of-memory-pretend": Situation(
        _gang(PYTORCH_JOB, "", nodes=1, **_pretend_end(137, "OOMKilled")),
        F, Reason.OUT_OF_MEMORY, code=137, node="pretend",
    ),
    "evicted-by-kubelet": Situation(_kubelet_evicts, F, Reason.EVICTED, "exceeds the limit", code=137, slow=True),
    "evicted": Situation(_evicted, F, Reason.EVICTED, "is taken away: Eviction API", "worker-0", node="node-1"),
    "overdue": Situation(
        _evicted, F, Reason.NODE_LOST, "its node is lost", "worker-0", node="node-1", slow=True,
        after=timedelta(hours=1),
    ),
    "preempted": Situation(_preempted, F, Reason.PREEMPTED, "is taken away", node="node-1", slow=True),
    "preempted-and-gone": Situation(
        _preempted_and_gone, F, Reason.PREEMPTED, "Preempted by pod", slow=True
    ),
    "node-silent": Situation(_silent, R, Reason.NODE_LOST, "does not answer", node="pretend", slow=True),
    "node-lost": Situation(
        _silent, F, Reason.NODE_LOST, "does not answer", node="pretend", slow=True, after=timedelta(minutes=6)
    ),
    "evicted-by-taint": Situation(_evicted_by_taint, F, Reason.NODE_LOST, "", slow=True),
    "pod-removed": Situation(_removed(PYTORCH_JOB, **PRETEND), F, Reason.EVICTED, "removed from outside"),
    "pod-removed-train-job": Situation(_removed(TRAIN_JOB), F, Reason.EVICTED, "removed from outside"),
    "pod-removed-indexed-job": Situation(_removed(INDEXED_JOB), F, Reason.EVICTED, "removed from outside"),
    "deleted": Situation(_deleted, Phase.CANCELLED, Reason.DELETED, "being deleted"),
    "deadline": Situation(_gang(PYTORCH_JOB, SLEEP, deadline_seconds=1, **PRETEND), F, Reason.DEADLINE, "deadline"),
    "deadline-train-job": Situation(_gang(TRAIN_JOB, SLEEP, deadline_seconds=1, **PRETEND), F, Reason.DEADLINE),
    "deadline-indexed-job": Situation(_gang(INDEXED_JOB, SLEEP, deadline_seconds=1, **PRETEND), F, Reason.DEADLINE),
    "collective": Situation(
        _collective, F, Reason.BAD_DATA, "rank 2 (worker-1) failed first on node-1 with exit code 11: ValueError: row",
        "worker-1", 11, "node-1", more={"victims": 2}, slow=True,
    ),
    "missing-secret": Situation(_missing_secret, F, Reason.USER_ERROR, 'secret "no-such-secret" not found', "master-0"),
    "missing-volume": Situation(_missing_volume, S, Reason.USER_ERROR, 'secret "no-such-secret" not found'),
    "crash-loop": Situation(_crash_loop, Phase.RESTARTING, words="exit code 7 and is started again", slow=True),
    "ttl": Situation(_gone_with_events(PYTORCH_JOB), Phase.SUCCEEDED, words="removed since", gone=True),
    "ttl-indexed-job": Situation(_gone_with_events(INDEXED_JOB), Phase.SUCCEEDED, words="removed since", gone=True),
}  # fmt: skip
for _kind, _replica in ((PYTORCH_JOB, "worker-0"), (TRAIN_JOB, "node-1"), (INDEXED_JOB, "node-1")):
    SITUATIONS[f"succeeded-{_kind.plural}"] = Situation(
        _gang(_kind, MEET_OF_ANY_KIND), Phase.SUCCEEDED, more={"pods_wanted": 2}
    )
    SITUATIONS[f"failed-{_kind.plural}"] = Situation(
        _gang(_kind, _BAD), F, Reason.BAD_DATA, "exit code 11: shard 3 is broken", _replica, 11, "node-1"
    )
