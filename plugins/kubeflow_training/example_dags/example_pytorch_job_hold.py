"""A job whose pods idle with their full environment until a user releases them."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

with DAG("example_pytorch_job_hold", schedule=None, params={"namespace": "default", "image": "busybox:1.37"}):
    # [START howto_hold]
    PyTorchJobOperator(
        task_id="experiment",
        hold=True,
        run_timeout=timedelta(hours=8),
        spec=TrainingJobSpec(
            namespace="{{ params.namespace }}",
            image="{{ params.image }}",
            image_pull_policy="IfNotPresent",
            command=["sh", "-c", "echo training"],
            cpus=0.1,
            memory_gb=0.1,
        ),
    )
    # [END howto_hold]
