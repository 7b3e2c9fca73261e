"""A job of two processes on this machine, from a typed spec; the next task uses the result."""

from __future__ import annotations

from typing import Any

# [START howto_quick_start]
from airflow.sdk import DAG, task

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

SCRIPT = """
import json, os
rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"I am rank {rank} of {ranks}")
print("@progress", json.dumps({"step": 3, "steps": 3, "loss": 0.25}))
if rank == "0":
    with open(os.environ.get("TERMINATION_LOG", "/dev/termination-log"), "w") as file:
        json.dump({"exit_code": 0, "rank": 0, "model": "s3://models/7"}, file)
"""

with DAG("example_pytorch_job", schedule=None):
    train = PyTorchJobOperator(
        task_id="train",
        backend="local",
        spec=TrainingJobSpec(
            image="none",  # the local cluster uses no image
            command=["python", "-c", SCRIPT],
            nodes=2,
            cpus=0.5,
            memory_gb=0.5,
        ),
    )
    # [END howto_quick_start]

    # [START howto_result]
    @task
    def register(result: Any) -> str:
        print(f"{result['name']} ran for {result['durations']['running']} seconds")
        return str(result["message"]["model"])

    register(train.output)
    # [END howto_result]
