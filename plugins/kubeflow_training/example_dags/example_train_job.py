"""A TrainJob of Kubeflow Trainer 2.x, with a runtime by name."""

from __future__ import annotations

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

PARAMS = {
    "namespace": "default",
    "image": "busybox:1.37",
    "runtime": "torch-distributed",
    "runtime_kind": "ClusterTrainingRuntime",
}

with DAG("example_train_job", schedule=None, params=PARAMS):
    # [START howto_train_job]
    PyTorchJobOperator(
        task_id="train",
        kind="TrainJob",
        spec=TrainingJobSpec(
            namespace="{{ params.namespace }}",
            image="{{ params.image }}",
            command=["sh", "-c", 'echo "node $PET_NODE_RANK of $PET_NNODES"'],
            nodes=2,
            cpus=0.1,
            memory_gb=0.1,
            runtime="{{ params.runtime }}",
            runtime_kind="{{ params.runtime_kind }}",
        ),
    )
    # [END howto_train_job]
