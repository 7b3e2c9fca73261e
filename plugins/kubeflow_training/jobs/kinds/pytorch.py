"""PyTorchJob, `kubeflow.org/v1`: the Kubeflow training operator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.manifest.checks.pytorch import check
from kubeflow_training.jobs.manifest.words import CONTAINER, JOB_NAME_LABEL, REPLICA_INDEX_LABEL, REPLICA_TYPE_LABEL
from kubeflow_training.jobs.shapes import labels, mapping, whole


class _PyTorchJob(Kind):
    def replica(self, pod: Mapping[str, Any]) -> str:
        kind = str(labels(pod).get(REPLICA_TYPE_LABEL) or "").lower()
        return f"{kind}-{self._index(pod)}" if kind else self._place(pod)

    def node_rank(self, pod: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> int:
        worker = str(labels(pod).get(REPLICA_TYPE_LABEL) or "").lower() == "worker"
        # An elastic job may have workers alone, and then the first of them leads.
        alone = job is not None and bool(self._replicas(job)) and "Master" not in self._replicas(job)
        return self._index(pod) + (1 if worker and not alone else 0)

    def wanted(self, job: Mapping[str, Any]) -> int | None:
        return sum(_count(mapping(item).get("replicas", 1)) for item in self._replicas(job).values()) or None

    def processes(self, job: Mapping[str, Any]) -> int:
        each = str(mapping(job.get("spec")).get("nprocPerNode") or 1)
        return int(each) if each.isdecimal() else 1

    def requests(self, job: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
        found = []
        for item in map(mapping, self._replicas(job).values()):
            pod = mapping(mapping(item.get("template")).get("spec"))
            found.append((_count(item.get("replicas", 1)), mapping(self._training(pod).get("resources"))))
        return found

    def suspended(self, job: Mapping[str, Any]) -> bool:
        policy = mapping(mapping(job.get("spec")).get("runPolicy"))
        return policy.get("suspend") is True or "Suspended" in self.conditions(job)

    def restarts(self, job: Mapping[str, Any]) -> bool:
        # The operator takes OnFailure for a replica that says nothing; a job that says nothing at all is no gang.
        policies = {str(mapping(item).get("restartPolicy")) for item in self._replicas(job).values()}
        return not (policies and policies <= {"Never"})

    def deadline_seconds(self, job: Mapping[str, Any]) -> int | None:
        return whole(mapping(mapping(job.get("spec")).get("runPolicy")).get("activeDeadlineSeconds"))

    def keeps_failed_pods(self, job: Mapping[str, Any]) -> bool:
        policy = mapping(mapping(job.get("spec")).get("runPolicy")).get("cleanPodPolicy")
        return policy in ("Running", "None") and not self.restarts(job)

    def pod_specs(self, manifest: dict[str, Any]) -> Sequence[dict[str, Any]]:
        return [item["template"]["spec"] for item in manifest["spec"]["pytorchReplicaSpecs"].values()]

    def problems(self, manifest: Mapping[str, Any]) -> list[Problem]:
        return check(manifest)

    def _replicas(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return mapping(mapping(job.get("spec")).get("pytorchReplicaSpecs"))

    def _index(self, pod: Mapping[str, Any]) -> int:
        return whole(labels(pod).get(REPLICA_INDEX_LABEL)) or 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


PYTORCH_JOB: Final = _PyTorchJob(
    name="PyTorchJob",
    group="kubeflow.org",
    version="v1",
    plural="pytorchjobs",
    container=CONTAINER,
    job_label=JOB_NAME_LABEL,
    success=frozenset({"Succeeded"}),
    failure=frozenset({"Failed"}),
    leader_decides=True,
    controller="the Kubeflow training operator",
)
