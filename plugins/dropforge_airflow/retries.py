"""How often and when tasks are tried again: services may be away for five minutes, and no run fails for that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kubeflow_training.retries import RetryBudget

# Pauses of at least 10, 20, 40, 80 and 160 seconds: an S3 that refuses connections fails a try within seconds. Airflow
# makes each up to twice as long.
PLAIN_TASK: Final[dict[str, Any]] = {
    "retries": 5,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 2,
    "max_retry_delay": timedelta(minutes=3),
}
"""Default arguments of a DAG's tasks. What a person must mend fails at once all the same."""

OWN_FAILURES: Final = RetryBudget(PLAIN_TASK["retries"], jobs=2)
WAITING_TASK: Final[dict[str, Any]] = {"retries": OWN_FAILURES.retries + 2, "retry_policy": OWN_FAILURES}
"""Arguments of a task that defers or waits: two tries more, for what Airflow ends; see
`kubeflow_training.state_mismatch`."""
