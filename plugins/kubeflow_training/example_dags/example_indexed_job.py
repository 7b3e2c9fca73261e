"""A training as a plain indexed Job: for clusters without any training operator."""

from __future__ import annotations

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

with DAG("example_indexed_job", schedule=None, params={"namespace": "default", "image": "busybox:1.37"}):
    # [START howto_indexed_job]
    PyTorchJobOperator(
        task_id="train",
        kind="Job",
        spec=TrainingJobSpec(
            namespace="{{ params.namespace }}",
            image="{{ params.image }}",
            image_pull_policy="IfNotPresent",
            command=["sh", "-c", 'echo "rank $RANK of $WORLD_SIZE, master $MASTER_ADDR"'],
            nodes=2,
            cpus=0.1,
            memory_gb=0.1,
        ),
    )
    # [END howto_indexed_job]
