"""Live jobs whose tasks are over are found and deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG

# [START howto_reaper]
from kubeflow_training.reaper import JobReaperOperator

with DAG(
    "example_job_reaper",
    schedule="*/15 * * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
):
    JobReaperOperator(task_id="reap", backend="local", namespaces=["default"], grace=timedelta(minutes=5))
    # [END howto_reaper]
