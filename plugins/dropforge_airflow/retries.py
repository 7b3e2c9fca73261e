"""How often a failed gang is replaced: as often as the recipe says, whatever else interrupts the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryPolicy
from airflow.sdk.definitions.retry_policy import RetryDecision
from kubeflow_training.exceptions import JobFailed

if TYPE_CHECKING:
    from airflow.sdk import Context


class GangBudget(RetryPolicy):
    """Ends the task when the gangs of `compute.retries` are used up.

    The task's own `retries` is a static upper limit: it also pays for lost workers, which cost no gang.

    :param task_id: the task that returns the number under the key `retries`.
    """

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,  # noqa: ARG002
        max_tries: int,  # noqa: ARG002
        context: Context | None = None,
    ) -> RetryDecision:
        if not isinstance(exception, JobFailed) or context is None:
            return RetryDecision.default()
        from kubeflow_training.operators import STATE_KEY

        job: Any = context["task_state_store"].get(STATE_KEY) or {}
        allowed = int(context["ti"].xcom_pull(task_ids=self.task_id, key="retries") or 0)
        return decide(int(job.get("attempt", 1)), allowed)

    def serialize(self) -> dict[str, Any]:
        return {"task_id": self.task_id}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> GangBudget:
        return cls(data["task_id"])


def decide(gang: int, allowed: int) -> RetryDecision:
    """After gang number `gang` failed, with `allowed` gangs beyond the first."""
    if gang > allowed:
        return RetryDecision.fail(f"gang {gang} failed; the recipe allows {allowed} retries (compute.retries)")
    return RetryDecision.default()
