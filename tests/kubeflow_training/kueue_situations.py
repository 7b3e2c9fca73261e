"""Situations of jobs that Kueue holds back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kubeflow_training.jobs.kinds import PYTORCH_JOB, Kind
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.jobs.observation.reasons import Reason

from tests.kubeflow_training.situations import PRETEND, SLEEP, Job, Situation, Stage

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
QUEUE = "training"
# A pretend gang of two takes the whole quota of 8 GPUs.
GANG: dict[str, Any] = {**PRETEND, "gpus": 4, "queue": QUEUE}


def queue(
    stage: Stage, *, cpus: str = "100", preemption: str = "LowerPriority", flavor: dict[str, Any] | None = None
) -> None:
    """A cluster queue of 8 pretend GPUs with a local queue in the stage's namespace, and an urgent priority.

    :param flavor: the spec of its ResourceFlavor, which says on which nodes its pods run.
    """
    stage.once("queue", lambda: _make(stage, cpus, preemption, flavor or {}))
    end = time.monotonic() + 30
    while not _active(stage):
        assert time.monotonic() < end
        time.sleep(0.1)


def _make(stage: Stage, cpus: str, preemption: str, flavor_spec: dict[str, Any]) -> list[Callable[[], Any]]:
    name, undo = f"test-{stage.namespace}", []

    def cluster_wide(plural: str, kind: str, **body: Any) -> None:
        whole = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, **body}
        stage.custom.create_cluster_custom_object(GROUP, VERSION, plural, whole)
        undo.append(lambda: stage.custom.delete_cluster_custom_object(GROUP, VERSION, plural, name))

    quotas = [("cpu", cpus), ("memory", "100Gi"), ("nvidia.com/gpu", "8")]
    flavor = {"name": name, "resources": [{"name": key, "nominalQuota": value} for key, value in quotas]}
    cluster_wide("resourceflavors", "ResourceFlavor", spec=flavor_spec)
    cluster_wide("workloadpriorityclasses", "WorkloadPriorityClass", value=1000)
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}},
        "preemption": {"withinClusterQueue": preemption},
        "resourceGroups": [{"coveredResources": [key for key, _ in quotas], "flavors": [flavor]}],
    }
    cluster_wide("clusterqueues", "ClusterQueue", spec=spec)
    local = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LocalQueue",
        "metadata": {"name": QUEUE},
        "spec": {"clusterQueue": name},
    }
    stage.custom.create_namespaced_custom_object(GROUP, VERSION, stage.namespace, "localqueues", local)
    return undo


def _active(stage: Stage) -> bool:
    found = stage.custom.get_namespaced_custom_object(GROUP, VERSION, stage.namespace, "localqueues", QUEUE)
    conditions = found.get("status", {}).get("conditions", [])
    return any(item["type"] == "Active" and item["status"] == "True" for item in conditions)


def urgent(stage: Stage) -> dict[str, Any]:
    return {**GANG, "queue_priority": f"test-{stage.namespace}"}


def second_in_queue(stage: Stage, kind: Kind = PYTORCH_JOB) -> Job:
    queue(stage)
    stage.submit(SLEEP, kind, **GANG).running()
    first = stage.submit(SLEEP, kind, **GANG)
    first.until(lambda seen: seen.position == 1)
    time.sleep(1.0)  # Kueue orders by whole seconds, and what was made in the same one by chance
    return stage.submit(SLEEP, kind, **GANG)


def preempted(stage: Stage, kind: Kind = PYTORCH_JOB) -> Job:
    queue(stage)
    job = stage.submit(SLEEP, kind, **GANG)
    job.running()
    stage.submit(SLEEP, kind, **urgent(stage))
    return job


def _no_queue(stage: Stage) -> Job:
    return stage.submit(SLEEP, **{**GANG, "queue": "no-such-queue"})


Q = Phase.QUEUED
KUEUE: dict[str, Situation] = {
    "kueue-second": Situation(
        second_in_queue, Q, Reason.QUOTA, "waits at position 2 of queue training: couldn't assign flavors",
        more={"queue": QUEUE, "position": 2},
    ),
    "kueue-preempted": Situation(
        preempted, Q, Reason.PREEMPTED, "preempted (", more={"queue": QUEUE, "position": 1}
    ),
    "kueue-no-queue": Situation(_no_queue, Q, Reason.USER_ERROR, "no-such-queue", more={"position": None}),
}  # fmt: skip
