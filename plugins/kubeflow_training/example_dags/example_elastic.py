"""A job that continues to train with one node while the other one is missing."""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG

from kubeflow_training.operators import PyTorchJobOperator

SCRIPT = str(Path(__file__).with_name("elastic_training.py"))

with DAG("example_elastic", schedule=None):
    # [START howto_elastic]
    from kubeflow_training.jobs.spec import ElasticPolicy, TrainingJobSpec

    PyTorchJobOperator(
        task_id="train",
        backend="local",
        spec=TrainingJobSpec(
            image="none",
            command=["python", "-m", "torch.distributed.run", SCRIPT],
            nodes=2,
            cpus=0.5,
            memory_gb=1,
            elastic=ElasticPolicy(min_nodes=1, restarts=10, rendezvous={"last_call_timeout": "5"}),
        ),
    )
    # [END howto_elastic]
