"""A job that Kueue admits; until then it is shown as queued."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

PARAMS = {"namespace": "default", "image": "busybox:1.37", "queue": "training"}

with DAG("example_kueue", schedule=None, params=PARAMS):
    # [START howto_kueue]
    PyTorchJobOperator(
        task_id="train",
        queue_timeout=timedelta(hours=12),
        spec=TrainingJobSpec(
            namespace="{{ params.namespace }}",
            image="{{ params.image }}",
            image_pull_policy="IfNotPresent",
            command=["sh", "-c", "echo admitted"],
            cpus=0.1,
            memory_gb=0.1,
            queue="{{ params.queue }}",
        ),
    )
    # [END howto_kueue]
