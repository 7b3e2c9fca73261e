"""What a worker that died at the wrong moment leaves behind: jobs are deleted, MLflow runs are ended.

`KUBEFLOW_TRAINING_NAMESPACES` names the namespaces to look at on Kubernetes, with commas between them.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, task
from dropforge_airflow.assets import REAP_DAG
from dropforge_airflow.tasks import orphans
from kubeflow_training.reaper import JobReaperOperator
from kubeflow_training.retries import RetryBudget

# What trainings (`compute.kind`) and curations on a cluster (`curation.spark.cluster`) are.
KINDS = ("PyTorchJob", "TrainJob", "Job", "SparkApplication")
NAMESPACES = [name.strip() for name in os.environ.get("KUBEFLOW_TRAINING_NAMESPACES", "").split(",") if name.strip()]

with DAG(
    REAP_DAG,
    dag_display_name="Dropforge: reap",
    description="Deletes jobs and ends MLflow runs that a lost worker left behind.",
    schedule="*/15 * * * *",
    # No backfill: hundreds of runs at once, whatever `max_active_runs` says, would keep all others waiting.
    allowed_run_types=["scheduled", "manual", "operator_triggered"],  # type: ignore[list-item]  # as its docs say
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # A run waits out the grace of a job that it found; one that is started meanwhile must not wait for it.
    max_active_runs=4,
    tags=["dropforge", "maintenance"],
    doc_md=__doc__,
    default_args={
        "owner": "dropforge",
        "retries": 2,
        "retry_policy": RetryBudget(1),
        "retry_delay": timedelta(minutes=1),
    },
):
    task(task_id="mlflow_runs")(orphans.close)()
    if NAMESPACES:
        JobReaperOperator(task_id="kubernetes", backend="kubernetes", namespaces=NAMESPACES, kinds=(), also=KINDS)
    if os.environ.get("KUBEFLOW_TRAINING_HOME") or not NAMESPACES:
        JobReaperOperator(task_id="local", backend="local", namespaces=None)
