"""What people ask in MLflow to be done with a checkpoint: evaluate, export or register it.

Set the tag `dropforge.ask` of an MLflow run to `step-50 evaluate` (or `export`, `register`; `best` or `last` for the
step), or type `dropforge checkpoints RUN STEP evaluate`. The answer is the tag `dropforge.answer`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task
from dropforge_airflow.assets import ASKS, CHECKPOINTS_DAG
from dropforge_airflow.tasks import asked
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.retries import RetryBudget

with DAG(
    CHECKPOINTS_DAG,
    dag_display_name="Dropforge: checkpoints",
    description="Evaluates, exports or registers a checkpoint that a user asks for in MLflow.",
    schedule=ASKS,
    catchup=False,
    max_active_runs=1,
    tags=["dropforge", "training"],
    doc_md=__doc__,
    default_args={"owner": "dropforge", "retries": 2, "retry_delay": timedelta(seconds=10)},
):
    taken: Any = task(asked.take)()
    work = PyTorchJobOperator.partial(task_id="work", retries=3, retry_policy=RetryBudget(1)).expand_kwargs(
        taken.map(asked.job_of)
    )
    # A job that fails has its answer too.
    work >> task(trigger_rule="all_done")(asked.answer)(taken)
