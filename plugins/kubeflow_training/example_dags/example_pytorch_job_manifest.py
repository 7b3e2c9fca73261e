"""The job as a manifest: a mapping, YAML text, a template file, and what another task returns."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, task

from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.operators import PyTorchJobOperator

SMALL: dict[str, Any] = {"image": "none", "cpus": 0.5, "memory_gb": 0.5}

with DAG("example_pytorch_job_manifest", schedule=None, params={"epochs": 3}, default_args={"poll_interval": 0.5}):
    # [START howto_manifest_mapping]
    PyTorchJobOperator(
        task_id="mapping",
        backend="local",
        manifest=pytorch_job(
            name="train-weekly",
            command=["python", "-c", "print('{{ params.epochs }} epochs')"],
            **SMALL,
        ),
    )
    # [END howto_manifest_mapping]

    # [START howto_manifest_text]
    PyTorchJobOperator(
        task_id="text",
        backend="local",
        manifest="""
            apiVersion: kubeflow.org/v1
            kind: PyTorchJob
            metadata: {name: from-a-text}
            spec:
              pytorchReplicaSpecs:
                Master:
                  replicas: 1
                  restartPolicy: Never
                  template:
                    spec:
                      containers:
                        - name: pytorch
                          image: none
                          command: [python, -c, "print('run {{ run_id }}')"]
        """,
    )
    # [END howto_manifest_text]

    # [START howto_manifest_file]
    PyTorchJobOperator(task_id="file", backend="local", manifest="pytorch_job.yaml")
    # [END howto_manifest_file]

    # [START howto_manifest_task]
    @task
    def plan() -> dict[str, Any]:
        return pytorch_job(name="from-a-task", command=["python", "-c", "print('planned')"], **SMALL)

    PyTorchJobOperator(task_id="task", backend="local", manifest=plan())
    # [END howto_manifest_task]
