"""TrainJob, `trainer.kubeflow.org/v1alpha1`: Kubeflow Trainer's, whose pods are those of a JobSet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.manifest.checks.metadata import name_problems
from kubeflow_training.jobs.manifest.checks.pod import pod_secret_problems, secret_problems
from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.shapes import items, labels, mapping, moment, whole

NODE: Final = "node"
"""Name of the JobSet's replicated job that trains, and of its container."""
_PART_LABEL: Final = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
MANAGER: Final = "kubeflow-training/airflow"
"""Who the runtime patches of our manifests are by: the API wants a name with a domain."""


class _TrainJob(Kind):
    def creator(self, job_name: str) -> str:
        return f"{job_name}-{NODE}-0"

    def owns(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
        # A pod's owner is the Job of a JobSet of this TrainJob: three steps away. Nothing older than the job is its.
        born = moment(mapping(job.get("metadata")).get("creationTimestamp"))
        made = moment(mapping(pod.get("metadata")).get("creationTimestamp"))
        return born is None or made is None or made >= born

    def training_container(self, pod: Mapping[str, Any]) -> str:
        part = str(labels(pod).get(_PART_LABEL) or NODE)
        found = [str(item.get("name")) for item in items(mapping(pod.get("spec")).get("containers"))]
        return next((item for item in (part, self.container) if item in found), found[0] if found else self.container)

    def replica(self, pod: Mapping[str, Any]) -> str:
        part = labels(pod).get(_PART_LABEL)
        return f"{part}-{self.node_rank(pod)}" if part else self._place(pod)

    def node_rank(self, pod: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> int:  # noqa: ARG002
        return whole(labels(pod).get(_INDEX_LABEL)) or 0

    def wanted(self, job: Mapping[str, Any]) -> int | None:
        return whole(mapping(mapping(job.get("spec")).get("trainer")).get("numNodes"))

    def processes(self, job: Mapping[str, Any]) -> int:
        return whole(mapping(mapping(job.get("spec")).get("trainer")).get("numProcPerNode")) or 1

    def requests(self, job: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
        trainer = mapping(mapping(job.get("spec")).get("trainer"))
        return [(self.wanted(job) or 1, mapping(trainer.get("resourcesPerNode")))]

    def suspended(self, job: Mapping[str, Any]) -> bool:
        return mapping(job.get("spec")).get("suspend") is True or "Suspended" in self.conditions(job)

    def restarts(self, job: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return True  # the runtime says, and the job does not show it

    def keeps_failed_pods(self, job: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return True  # a JobSet that has failed ends what is active alone, and so do its Jobs

    def pod_specs(self, manifest: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """The pod spec of this library's runtime patch, which is added if it is missing."""
        return [patched_pod(manifest)]

    def problems(self, manifest: Mapping[str, Any]) -> Iterator[Problem]:
        # The JobSet refuses a name to which NAME-node-0-INDEX-abcde, of its pods, is too long: they would never come.
        spec = mapping(manifest.get("spec"))
        nodes = whole(mapping(spec.get("trainer")).get("numNodes")) or 1
        yield from name_problems(mapping(manifest.get("metadata")), f"-{NODE}-0-{nodes - 1}-abcde")
        if not mapping(spec.get("runtimeRef")).get("name"):
            yield Problem("spec.runtimeRef.name", "it is missing", "Name a runtime, such as torch-distributed")
        yield from secret_problems("spec.trainer", mapping(spec.get("trainer")))
        try:
            pod: Any = self.pod_specs(deepcopy({**manifest, "spec": dict(spec)}))[0]
        except (AttributeError, TypeError):
            pod = None
        if not isinstance(pod, dict):
            yield Problem("spec.runtimePatches", "it is no list of patches", "Look at `kubectl explain trainjob.spec`")
        yield from pod_secret_problems("spec.runtimePatches", mapping(pod))


def patched_pod(manifest: dict[str, Any], manager: str = MANAGER) -> dict[str, Any]:
    """The pod spec of this manager's runtime patch, which is added if it is missing."""
    patches = manifest["spec"].setdefault("runtimePatches", [])
    patch = next((item for item in patches if item.get("manager") == manager), None)
    if patch is None:
        patches.append(patch := {"manager": manager})
    spec = patch.setdefault("trainingRuntimeSpec", {}).setdefault("template", {}).setdefault("spec", {})
    jobs = spec.setdefault("replicatedJobs", [])
    job = next((item for item in jobs if item.get("name") == NODE), None)
    if job is None:
        jobs.append(job := {"name": NODE})
    inner: dict[str, Any] = job
    for key in ("template", "spec", "template", "spec"):
        inner = inner.setdefault(key, {})
    return inner


TRAIN_JOB: Final = _TrainJob(
    name="TrainJob",
    group="trainer.kubeflow.org",
    version="v1alpha1",
    plural="trainjobs",
    container=NODE,
    job_label="jobset.sigs.k8s.io/jobset-name",
    success=frozenset({"Complete"}),
    failure=frozenset({"Failed"}),
    leader_decides=False,
    controller="Kubeflow Trainer",
)
