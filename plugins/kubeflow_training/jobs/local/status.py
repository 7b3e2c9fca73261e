"""What a local job looks like to its readers: conditions, pods and events in the shapes of the Kubernetes API. Pure."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubeflow_training.jobs.elastic import FITS_REASON
from kubeflow_training.jobs.local.layout import timestamp
from kubeflow_training.jobs.manifest.words import CONTAINER, JOB_NAME_LABEL, REPLICA_INDEX_LABEL, REPLICA_TYPE_LABEL

NODE = socket.gethostname()


@dataclass(frozen=True)
class PodPlan:
    """One pod of a gang.

    :param kind: "master" or "worker".
    :param index: index within its kind; `rank` is the node rank.
    """

    name: str
    uid: str
    kind: str
    index: int
    rank: int


def pod_plans(manifest: Mapping[str, Any], job_uid: str) -> list[PodPlan]:
    """The pods of the manifest, the master first; their uids follow from the job's."""
    name, replicas = manifest["metadata"]["name"], manifest["spec"]["pytorchReplicaSpecs"]
    kinds = [
        (kind.lower(), index)
        for kind in ("Master", "Worker")
        if kind in replicas
        for index in range(replicas[kind].get("replicas", 1))
    ]
    return [
        PodPlan(f"{name}-{kind}-{index}", f"{job_uid}-{rank}", kind, index, rank)
        for rank, (kind, index) in enumerate(kinds)
    ]


def pod(
    plan: PodPlan,
    manifest: Mapping[str, Any],
    job_uid: str,
    *,
    record: Mapping[str, Any] | None = None,
    waiting: str | None = None,
    fits: bool = False,
    lost: str | None = None,
    shutdown: bool = False,
    restarts: int = 0,
    previous: Mapping[str, Any] | None = None,
    returns: bool = False,
) -> dict[str, Any]:
    """A Pod as the API server would show it.

    :param record: what the pod's keeper wrote, if anything yet.
    :param waiting: why it has no place yet; `fits` if it has room and the rest of its gang has not.
    :param lost: when its keeper was found dead, with the exit status unknown.
    :param shutdown: whether it was ended because the cluster stops.
    :param restarts: how often it was started again; `previous` is how the last of its lives ended.
    :param returns: whether it is down now and will be started again.
    """
    metadata = manifest["metadata"]
    status: dict[str, Any] = {"phase": "Pending"}
    state: Mapping[str, Any] = (record or {}).get("state") or {}
    terminated = state.get("terminated")
    if waiting is not None:
        status["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": FITS_REASON if fits else "Unschedulable",
                "message": waiting,
            }
        ]
    elif returns:
        status["phase"] = "Running"
        previous = terminated or {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": lost}
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": "it is started again"}}
    elif terminated is None and lost is not None:
        status |= {"phase": "Failed", "reason": "NodeLost", "message": "the process that runs the pod was killed"}
        state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": lost}}
    elif terminated is not None:
        status["phase"] = "Succeeded" if terminated["exitCode"] == 0 else "Failed"
        if shutdown and terminated["exitCode"] != 0:
            status |= {"reason": "Terminated", "message": "the local cluster was stopped"}
    elif state.get("running"):
        status["phase"] = "Running"
    if waiting is None:
        container = {
            "name": CONTAINER,
            "ready": "running" in state,
            "restartCount": restarts,
            "state": state or {"waiting": {"reason": "ContainerCreating"}},
        }
        if previous:
            container["lastState"] = {"terminated": previous}
            status["phase"] = "Running" if status["phase"] == "Pending" else status["phase"]
        status["containerStatuses"] = [container]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": plan.name,
            "namespace": metadata["namespace"],
            "uid": plan.uid,
            "labels": {
                JOB_NAME_LABEL: metadata["name"],
                REPLICA_TYPE_LABEL: plan.kind,
                REPLICA_INDEX_LABEL: str(plan.index),
            },
            "ownerReferences": [{"kind": "PyTorchJob", "name": metadata["name"], "uid": job_uid}],
        },
        "spec": {} if waiting is not None else {"nodeName": NODE},
        "status": status,
    }


def condition(status: dict[str, Any], kind: str, reason: str, message: str) -> None:
    """Set a condition as the training operator does: Running ends with the job, what is once true keeps its time."""
    conditions = [item for item in status.get("conditions", []) if item["type"] != kind]
    if kind in ("Succeeded", "Failed"):
        conditions = [{**item, "status": "False"} if item["type"] == "Running" else item for item in conditions]
        status.setdefault("completionTime", timestamp())
    now = timestamp()
    conditions.append({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now})
    status["conditions"] = conditions


def has(status: Mapping[str, Any], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in status.get("conditions", []))


def over(status: Mapping[str, Any]) -> bool:
    """Whether the job has succeeded or failed."""
    return has(status, "Succeeded") or has(status, "Failed")


def event(reason: str, message: str, name: str, *, warning: bool = False, kind: str = "PyTorchJob") -> dict[str, Any]:
    now = timestamp()
    return {
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "involvedObject": {"kind": kind, "name": name},
    }
