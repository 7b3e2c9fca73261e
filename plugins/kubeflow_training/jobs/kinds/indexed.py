"""Indexed Job, `batch/v1`: a gang on a cluster without any training operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.manifest.checks.metadata import name_problems
from kubeflow_training.jobs.manifest.checks.pod import pod_secret_problems
from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.manifest.words import CONTAINER
from kubeflow_training.jobs.shapes import items, labels, mapping, whole

_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"


class _IndexedJob(Kind):
    def replica(self, pod: Mapping[str, Any]) -> str:
        index = whole(labels(pod).get(_INDEX_LABEL))
        return self._place(pod) if index is None else f"node-{index}"

    def node_rank(self, pod: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> int:  # noqa: ARG002
        return whole(labels(pod).get(_INDEX_LABEL)) or 0

    def wanted(self, job: Mapping[str, Any]) -> int | None:
        spec = mapping(job.get("spec"))
        return whole(spec.get("completions")) or whole(spec.get("parallelism")) or 1

    def processes(self, job: Mapping[str, Any]) -> int:
        env = items(self._training(self._pod(job)).get("env"))
        said = next((item for item in env if item.get("name") == "PET_NPROC_PER_NODE"), {})
        each = str(said.get("value") or 1)
        return int(each) if each.isdecimal() else 1

    def requests(self, job: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
        return [(self.wanted(job) or 1, mapping(self._training(self._pod(job)).get("resources")))]

    def suspended(self, job: Mapping[str, Any]) -> bool:
        return mapping(job.get("spec")).get("suspend") is True or "Suspended" in self.conditions(job)

    def restarts(self, job: Mapping[str, Any]) -> bool:
        spec = mapping(job.get("spec"))
        return not (spec.get("backoffLimit") == 0 and self._pod(job).get("restartPolicy") == "Never")

    def keeps_failed_pods(self, job: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return True  # a Job that has failed ends its active pods alone

    def pod_specs(self, manifest: dict[str, Any]) -> Sequence[dict[str, Any]]:
        return [manifest["spec"]["template"]["spec"]]

    def _pod(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return mapping(mapping(mapping(job.get("spec")).get("template")).get("spec"))

    def service(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """The headless Service that gives the pods their names; None if the manifest wants none of that name."""
        metadata = mapping(job.get("metadata"))
        name = str(metadata.get("name") or "")
        if self._pod(job).get("subdomain") != name:
            return None
        service: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": metadata.get("namespace"), "labels": {self.job_label: name}},
            "spec": {
                "clusterIP": "None",
                # The ranks look for one another before any of them is ready.
                "publishNotReadyAddresses": True,
                "selector": {self.job_label: name},
            },
        }
        if uid := metadata.get("uid"):
            owner = {"apiVersion": self.api_version, "kind": self.name, "name": name, "uid": uid}
            service["metadata"]["ownerReferences"] = [owner]
        return service

    def problems(self, manifest: Mapping[str, Any]) -> Iterator[Problem]:
        spec = mapping(manifest.get("spec"))
        nodes = whole(spec.get("completions")) or 1
        yield from name_problems(mapping(manifest.get("metadata")), f"-{nodes - 1}")
        if spec.get("completionMode") != "Indexed":
            yield Problem(
                "spec.completionMode", "it is not Indexed", "Training pods need ranks; write `completionMode: Indexed`"
            )
        if nodes != (whole(spec.get("parallelism")) or 1):
            yield Problem(
                "spec.parallelism", "it is not `completions`", "All pods of a job run at once: make them equal"
            )
        pod = self._pod(manifest)
        if pod.get("restartPolicy") not in ("Never", "OnFailure"):
            yield Problem("spec.template.spec.restartPolicy", "a Job takes Never or OnFailure", "Write Never")
        if not any(item.get("image") for item in items(pod.get("containers"))):
            yield Problem("spec.template.spec.containers", "no container has an image", "Name one")
        yield from pod_secret_problems("spec.template.spec", pod)


INDEXED_JOB: Final = _IndexedJob(
    name="Job",
    group="batch",
    version="v1",
    plural="jobs",
    container=CONTAINER,
    job_label="batch.kubernetes.io/job-name",
    success=frozenset({"Complete"}),
    # The target is told first, while pods are still ending.
    failure=frozenset({"Failed", "FailureTarget"}),
    leader_decides=False,
    controller="the Job controller",
)
