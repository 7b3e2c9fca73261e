"""Waiting in a worker, limits, what is kept and what is deleted, and links."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

SPEC = TrainingJobSpec(image="none", command=["python", "-c", "print('done')"], cpus=0.5, memory_gb=0.5)
LOCAL: dict[str, Any] = {"backend": "local", "spec": SPEC}

with DAG("example_pytorch_job_options", schedule=None, default_args={"poll_interval": 0.5}):
    # [START howto_sync]
    PyTorchJobOperator(task_id="in_the_worker", deferrable=False, **LOCAL)
    # [END howto_sync]

    # [START howto_limits]
    PyTorchJobOperator(
        task_id="limited",
        queue_timeout=timedelta(hours=12),
        run_timeout=timedelta(hours=3),
        execution_timeout=timedelta(days=1),
        log_ranks="first",
        log_limit="20 MB",
        **LOCAL,
    )
    # [END howto_limits]

    # [START howto_on_finish]
    PyTorchJobOperator(task_id="tidy", on_finish="delete_succeeded", keep_failed=True, **LOCAL)
    # [END howto_on_finish]

    # [START howto_links]
    PyTorchJobOperator(
        task_id="linked",
        job_url="https://jobs.example.com/$namespace/$name",
        logs_url="https://logs.example.com/search?job=$name&gang=$gang",
        mlflow_url="https://mlflow.example.com/#/runs/$run",
        mlflow_run="{{ run_id }}",
        **LOCAL,
    )
    # [END howto_links]
