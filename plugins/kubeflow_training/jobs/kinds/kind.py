"""What differs between the kinds of jobs, behind one interface. Pure; reading never raises, whatever it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kubeflow_training.jobs.manifest.checks.problems import Problem, require_none
from kubeflow_training.jobs.shapes import items, labels, mapping, moment, name, whole


@dataclass(frozen=True)
class Kind(ABC):
    """
    :param name: like "PyTorchJob"; `group`, `version` and `plural` are its address in the API.
    :param container: name of the training container; a pod without it trains in its first one.
    :param job_label: label of the pods that holds the job's name.
    :param success, failure: types of conditions that, being true, tell the end.
    :param leader_decides: whether the success of the pod of node rank 0 is the job's, whatever the others do.
    :param controller: what a cluster needs so that it knows this kind.
    """

    name: str
    group: str
    version: str
    plural: str
    container: str
    job_label: str
    success: frozenset[str]
    failure: frozenset[str]
    leader_decides: bool
    controller: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    def selector(self, job_name: str) -> str:
        """Label selector of a job's pods; pods of an earlier job of that name may match too, see `owns`."""
        return f"{self.job_label}={job_name}"

    def creator(self, job_name: str) -> str:
        """Name of the object that creates the pods, whose events tell why there are none."""
        return job_name

    def job_name(self, pod: Mapping[str, Any]) -> str | None:
        """Name of the job that the pod belongs to."""
        return str(labels(pod).get(self.job_label) or "") or None

    def owns(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
        """Whether the pod is this very job's, and not one of an earlier job of the same name."""
        uid = mapping(job.get("metadata")).get("uid")
        return uid in {owner.get("uid") for owner in items(mapping(pod.get("metadata")).get("ownerReferences"))}

    def part_of_another(self, job: Mapping[str, Any]) -> bool:
        """Whether something else made the job for its own purposes, as a JobSet makes Jobs."""
        owners = items(mapping(job.get("metadata")).get("ownerReferences"))
        return any(owner.get("controller") is True for owner in owners)

    def training_container(self, pod: Mapping[str, Any]) -> str:
        """Name of the container that trains, whose log and exit code count."""
        found = [str(item.get("name")) for item in items(mapping(pod.get("spec")).get("containers"))]
        return self.container if self.container in found or not found else found[0]

    @abstractmethod
    def replica(self, pod: Mapping[str, Any]) -> str:
        """The pod's place in the gang, like `worker-0`; its name if it has none."""

    @abstractmethod
    def node_rank(self, pod: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> int:
        """The pod's node rank: 0 for the one that leads."""

    @abstractmethod
    def wanted(self, job: Mapping[str, Any]) -> int | None:
        """How many pods the job wants; None if the job does not say."""

    def processes(self, job: Mapping[str, Any]) -> int:  # noqa: ARG002
        """How many ranks a pod has; 1 if the job does not say."""
        return 1

    def requests(self, job: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """How many pods ask for which `resources` of their training container; empty if it cannot be told."""
        return []

    @abstractmethod
    def suspended(self, job: Mapping[str, Any]) -> bool:
        """Whether the job is to have no pods for now."""

    @abstractmethod
    def restarts(self, job: Mapping[str, Any]) -> bool:
        """Whether the cluster may replace a failed pod by itself."""

    def deadline_seconds(self, job: Mapping[str, Any]) -> int | None:
        """How long the job may run from its start time."""
        return whole(mapping(job.get("spec")).get("activeDeadlineSeconds"))

    def keeps_failed_pods(self, job: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether failed pods are sure to stay as long as the job does."""
        return False

    @abstractmethod
    def pod_specs(self, manifest: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """The pod specs inside the manifest, to be changed in place."""

    @abstractmethod
    def problems(self, manifest: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong with a manifest, without asking the cluster."""

    def require_valid(self, manifest: Mapping[str, Any]) -> None:
        """:raises ManifestError: naming every problem and its mend."""
        require_none(self.name, manifest, self.problems(mapping(manifest)))

    def conditions(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The conditions that are true, by type; the last one in the list is not the state."""
        found = items(mapping(job.get("status")).get("conditions"))
        return {str(item.get("type")): item for item in found if item.get("status") == "True"}

    def held_since(self, job: Mapping[str, Any]) -> datetime | None:
        """When the job was last suspended, or let go after that; None if it never was suspended."""
        found = items(mapping(job.get("status")).get("conditions"))
        told = (moment(item.get("lastTransitionTime")) for item in found if item.get("type") == "Suspended")
        return max((when for when in told if when), default=None)

    def failed(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The condition that tells the failure, if it failed."""
        return next((item for key, item in self.conditions(job).items() if key in self.failure), None)

    def succeeded(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The condition that tells the success, if it succeeded."""
        return next((item for key, item in self.conditions(job).items() if key in self.success), None)

    def ended(self, job: Mapping[str, Any]) -> bool:
        return self.failed(job) is not None or self.succeeded(job) is not None

    def _training(self, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        """The training container of a pod's spec."""
        name = self.training_container({"spec": pod})
        return next((item for item in items(pod.get("containers")) if item.get("name") == name), {})

    def _place(self, pod: Mapping[str, Any]) -> str:
        return name(pod) or "a pod"
