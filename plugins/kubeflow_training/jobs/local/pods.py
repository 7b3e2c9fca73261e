"""The pods of one gang: which have their place, which are down, which come back, and how they ended. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.local import status
from kubeflow_training.jobs.local.records import read_record
from kubeflow_training.jobs.shapes import moment


class Pods:
    """
    :param job_folder: the job's folder, with one for each pod.
    :param state: the gang's state, which the gang brings forward.
    """

    def __init__(self, job_folder: Path, manifest: Mapping[str, Any], uid: str, state: Mapping[str, Any]) -> None:
        self.manifest, self.uid, self.state = manifest, uid, state
        self.plans: Sequence[status.PodPlan] = status.pod_plans(manifest, uid)
        self.elastic = bool(manifest["spec"].get("elasticPolicy"))
        self.records: dict[str, dict[str, Any]] = {}
        """What the pods' keepers wrote, by name."""
        self._folder = job_folder

    def folder(self, plan: status.PodPlan) -> Path:
        return self._folder / "pods" / plan.name

    def placed(self) -> Sequence[status.PodPlan]:
        """The pods that were given their place; an elastic gang may have fewer than it asked for."""
        plan = self.state["plan"]
        return [] if plan is None else self.plans[: len(plan.get("pods", self.plans))]

    def leader(self) -> status.PodPlan | None:
        """The pod whose success is the job's: the master, or any worker where there is none, as the operator has it."""
        if self.plans[0].kind == "master":
            return self.plans[0]
        return next((plan for plan in self.placed() if self.code(plan) == 0), None)

    def down(self, plan: status.PodPlan) -> bool:
        return plan.name in self.state["lost"] or "terminated" in self.records.get(plan.name, {}).get("state", {})

    def returns(self, plan: status.PodPlan) -> bool:
        """Whether the pod is down and will be started again."""
        if (
            not self.elastic
            or not self.down(plan)
            or self.state["ending"]
            or status.over(self.state["status"])
            or self.code(plan) == 0
        ):
            return False
        if (leader := self.leader()) and self.code(leader) == 0:
            return False
        replica = self.manifest["spec"]["pytorchReplicaSpecs"][plan.kind.capitalize()]
        if replica.get("restartPolicy") == "Never":
            return False
        limit = self.manifest["spec"].get("runPolicy", {}).get("backoffLimit")
        return limit is None or sum(self.state["restarts"].values()) < limit

    def over(self, plan: status.PodPlan) -> bool:
        """Whether the pod is down for good."""
        return self.down(plan) and not self.returns(plan)

    def code(self, plan: status.PodPlan) -> int | None:
        """Its exit code; None while it runs."""
        terminated = self.records.get(plan.name, {}).get("state", {}).get("terminated")
        if terminated is None:
            return 137 if plan.name in self.state["lost"] else None
        return int(terminated["exitCode"])

    def finished(self, plan: status.PodPlan) -> float | None:
        """Unix time of its end."""
        ended = self.records.get(plan.name, {}).get("state", {}).get("terminated", {}).get("finishedAt")
        at = moment(ended or self.state["lost"].get(plan.name))
        return at.timestamp() if at else None

    def shown(self) -> list[dict[str, Any]]:
        """All pods as the API server would show them."""
        shutdown = (self.state["ending"] or {}).get("why") == "shutdown"
        waiting = "waiting for room; the job runs without it"
        placed = self.placed()
        return [
            status.pod(
                plan,
                self.manifest,
                self.uid,
                record=self.records.get(plan.name),
                lost=self.state["lost"].get(plan.name),
                shutdown=shutdown,
                restarts=self.state["restarts"].get(plan.name, 0),
                previous=self._previous(plan),
                returns=self.returns(plan),
            )
            for plan in placed
        ] + [status.pod(plan, self.manifest, self.uid, waiting=waiting) for plan in self.plans[len(placed) :]]

    def _previous(self, plan: status.PodPlan) -> dict[str, Any] | None:
        """How the pod's last life ended, if it was started again."""
        if not self.state["restarts"].get(plan.name):
            return None
        record = read_record(self.folder(plan) / "previous.json") or {}
        found: dict[str, Any] | None = record.get("state", {}).get("terminated")
        return found or {"exitCode": 137, "reason": "ContainerStatusUnknown"}
