"""The retries of tasks that defer or wait: two for failures of their own, two for what Airflow ends."""

from __future__ import annotations

from typing import Any, Final

from kubeflow_training.retries import RetryBudget

OWN_FAILURES: Final = RetryBudget(2)
WAITING_TASK: Final[dict[str, Any]] = {"retries": OWN_FAILURES.retries + 2, "retry_policy": OWN_FAILURES}
"""Arguments of a task; see `kubeflow_training.state_mismatch`."""
