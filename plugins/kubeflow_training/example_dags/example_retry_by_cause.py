"""The first attempt ends like one with a broken collective, and the second succeeds."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

SCRIPT = """
import os, sys
if "-g2" not in os.environ["POD_NAME"]:
    sys.exit(21)
print("the second attempt succeeds")
"""

with DAG("example_retry_by_cause", schedule=None, default_args={"poll_interval": 0.5}):
    # [START howto_retry_by_cause]
    from kubeflow_training.jobs.budgets import Backoff
    from kubeflow_training.retries import RetryByCause

    policy = RetryByCause(
        {"preempted": 20, "unknown": 0},
        backoffs={"collective timeout": Backoff(1, factor=2, most=600)},
        avoid_for=timedelta(hours=1),
    )
    PyTorchJobOperator(
        task_id="train",
        backend="local",
        spec=TrainingJobSpec(image="none", command=["python", "-c", SCRIPT], cpus=0.5, memory_gb=0.5),
        retry_policy=policy,
        retries=policy.retries + 3,  # three for workers that are lost
    )
    # [END howto_retry_by_cause]
