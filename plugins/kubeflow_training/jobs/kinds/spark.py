"""SparkApplication, `sparkoperator.k8s.io/v1beta2`: a driver that leads, and executors that Spark itself replaces.

https://www.kubeflow.org/docs/components/spark-operator/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.manifest.checks.metadata import name_problems
from kubeflow_training.jobs.manifest.checks.pod import pod_secret_problems
from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.shapes import items, labels, mapping, moment, whole

DRIVER: Final = "spark-kubernetes-driver"
EXECUTOR: Final = "spark-kubernetes-executor"
_ROLE_LABEL: Final = "spark-role"
_EXECUTOR_LABEL: Final = "spark-exec-id"
_ENDED: Final = frozenset({"COMPLETED", "FAILED", "SUBMISSION_FAILED"})
"""`SUBMISSION_FAILED` too: of an application that is never restarted it is the last word."""


class _SparkApplication(Kind):
    def owns(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
        # Executors belong to the driver. Nothing older than the application is its.
        born = moment(mapping(job.get("metadata")).get("creationTimestamp"))
        made = moment(mapping(pod.get("metadata")).get("creationTimestamp"))
        return born is None or made is None or made >= born

    def training_container(self, pod: Mapping[str, Any]) -> str:
        found = [str(item.get("name")) for item in items(mapping(pod.get("spec")).get("containers"))]
        return next((item for item in (DRIVER, EXECUTOR) if item in found), found[0] if found else self.container)

    def replica(self, pod: Mapping[str, Any]) -> str:
        if labels(pod).get(_ROLE_LABEL) == "driver":
            return "driver"
        number = whole(labels(pod).get(_EXECUTOR_LABEL))
        return self._place(pod) if number is None else f"executor-{number}"

    def node_rank(self, pod: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> int:  # noqa: ARG002
        return 0 if labels(pod).get(_ROLE_LABEL) == "driver" else whole(labels(pod).get(_EXECUTOR_LABEL)) or 1

    def wanted(self, job: Mapping[str, Any]) -> int | None:
        return 1 + (whole(mapping(mapping(job.get("spec")).get("executor")).get("instances")) or 1)

    def suspended(self, job: Mapping[str, Any]) -> bool:
        spec, state = mapping(job.get("spec")), _state(job)
        return state in {"SUSPENDING", "SUSPENDED"} or (spec.get("suspend") is True and state not in _ENDED)

    def restarts(self, job: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return True  # Spark makes executors anew; the end of the driver is told by the application's own state

    def deadline_seconds(self, job: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        return None  # the operator knows none

    def conditions(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The application has one state in the place of conditions."""
        status = mapping(job.get("status"))
        state, message = _state(job), mapping(status.get("applicationState")).get("errorMessage")
        if not state:
            return {}
        when = status.get("terminationTime") if state in _ENDED else status.get("lastSubmissionAttemptTime")
        return {state: {"type": state, "status": "True", "message": message, "lastTransitionTime": when}}

    def pod_specs(self, manifest: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """The pod specs of both templates, which are added where they are missing."""
        roles = [manifest["spec"].setdefault(role, {}) for role in ("driver", "executor")]
        return [role.setdefault("template", {}).setdefault("spec", {}) for role in roles]

    def problems(self, manifest: Mapping[str, Any]) -> Iterator[Problem]:
        spec = mapping(manifest.get("spec"))
        yield from name_problems(mapping(manifest.get("metadata")), "-driver-svc")
        if mapping(spec.get("restartPolicy")).get("type") not in (None, "Never"):
            yield Problem("spec.restartPolicy.type", "the task decides about another try", "Write Never")
        if spec.get("mode") != "cluster":
            yield Problem("spec.mode", "it is not cluster", "The driver runs in a pod: write `mode: cluster`")
        for role in ("driver", "executor"):
            pod = mapping(mapping(mapping(spec.get(role)).get("template")).get("spec"))
            yield from pod_secret_problems(f"spec.{role}.template.spec", pod)
            for item in items(mapping(spec.get(role)).get("env")):
                if item.get("value"):
                    place = f"spec.{role}.env.{item.get('name')}"
                    yield Problem(place, "the operator's webhook alone reads it", "Put it into the pod template")


def _state(job: Mapping[str, Any]) -> str:
    return str(mapping(mapping(job.get("status")).get("applicationState")).get("state") or "")


SPARK_APPLICATION: Final = _SparkApplication(
    name="SparkApplication",
    group="sparkoperator.k8s.io",
    version="v1beta2",
    plural="sparkapplications",
    container=DRIVER,
    job_label="sparkoperator.k8s.io/app-name",
    success=frozenset({"COMPLETED"}),
    failure=frozenset({"FAILED", "SUBMISSION_FAILED"}),
    leader_decides=True,
    controller="the Spark operator",
)
