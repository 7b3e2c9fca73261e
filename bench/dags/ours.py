"""Tasks of our operator for `bench.resume`."""

from __future__ import annotations

from airflow.sdk import DAG
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.operators import PyTorchJobOperator
from noting import NAMESPACE, SELECTOR, TASKS, TOLERATIONS, Noting


class Noted(Noting, PyTorchJobOperator):
    pass


with DAG("ours", schedule=None):
    # Pods of pretend nodes write no log.
    Noted.partial(task_id="train", log_ranks="none").expand(
        manifest=[
            pytorch_job(
                name=f"ours-{number}",
                namespace=NAMESPACE,
                image="none",
                command=["true"],
                cpus=0.01,
                memory_gb=0.01,
                node_selector=SELECTOR,
                tolerations=TOLERATIONS,
            )
            for number in TASKS
        ]
    )
