"""A TrainJob of Kubeflow Trainer 2.x, with a runtime by name."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, task

from kubeflow_training.operators import PyTorchJobOperator

PARAMS = {
    "namespace": "default",
    "image": "busybox:1.37",
    "runtime": "torch-distributed",
    "runtime_kind": "ClusterTrainingRuntime",
}

with DAG("example_train_job", schedule=None, params=PARAMS):
    # [START howto_train_job]
    @task
    def plan(run: str, params: Any = None) -> dict[str, Any]:
        from kubeflow_training.jobs.kinds.compile import train_job
        from kubeflow_training.jobs.manifest import made_name

        return train_job(
            name=made_name("train-job", run, 40),
            namespace=params["namespace"],
            image=params["image"],
            command=["sh", "-c", 'echo "node $PET_NODE_RANK of $PET_NNODES"'],
            nodes=2,
            cpus=0.1,
            memory_gb=0.1,
            runtime=params["runtime"],
            runtime_kind=params["runtime_kind"],
        )

    PyTorchJobOperator(task_id="train", manifest=plan("{{ run_id }}"))
    # [END howto_train_job]
