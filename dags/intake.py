"""The way in: whatever arrived in the inbox becomes one partition event per complete drop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowSkipException
from dropforge_airflow.alerts.callbacks import RUN_FAILED, TASK_FAILED
from dropforge_airflow.assets import DROPS, FINETUNE_DAG, INBOX, INTAKE_DAG
from dropforge_airflow.retries import PLAIN_TASK

from dropforge.settings import families_folder

FAMILIES = families_folder(Path(__file__).parent)

with DAG(
    INTAKE_DAG,
    dag_display_name="Dropforge: intake",
    description="Enters what was uploaded, and starts a run for each complete drop.",
    schedule=INBOX,
    catchup=False,
    max_active_runs=1,
    tags=["dropforge", "intake"],
    doc_md=__doc__,
    default_args={"owner": "dropforge", **PLAIN_TASK, "on_failure_callback": TASK_FAILED},
    on_failure_callback=RUN_FAILED,
):

    @task(outlets=[DROPS])
    def take_in(**context: Any) -> dict[str, int]:
        """Work through the inbox and announce the drops that wait."""
        from dropforge_airflow.tasks.intake import run_intake

        done = run_intake(context["ti"], FINETUNE_DAG, FAMILIES)
        if not done.keys:
            # An outlet event without a partition key would be logged as an error by the scheduler.
            raise AirflowSkipException(done.summary())
        context["outlet_events"][DROPS].add_partitions(done.keys)
        return done.counts()

    take_in()
