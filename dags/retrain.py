"""By the calendar: one DAG per family whose file is in the folder `families`, or in that of `DROPFORGE_FAMILIES`.

A file that is broken is reported by `families.py` as an import error, and takes no other family's DAG away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.sdk import DAG, CronTriggerTimetable, Param, chain, task
from dropforge_airflow.alerts.callbacks import TASK_FAILED
from dropforge_airflow.assets import FINETUNE_DAG, RETRAIN_DAG
from dropforge_airflow.retries import PLAIN_TASK, WAITING_TASK
from dropforge_airflow.starting import AwaitRunOperator, LateOperator, StartRunOperator
from dropforge_airflow.tasks import retrain

from dropforge.families import Family, read_families
from dropforge.settings import families_folder

FORCE = Param(False, "Retrain although nothing changed.", type="boolean", title="Force")
DOC = """Retrains the family `{name}` on {data}, beginning with `{start}`, if its drops or its base are other than the
champion's. Why it did not is in the log of `look`, and among its XComs."""


def calendar(name: str, family: Family) -> None:
    """The DAG of one family."""
    assert family.cron is not None
    with DAG(
        f"{RETRAIN_DAG}_{name}",
        dag_display_name=f"Dropforge: retrain {name}",
        description=f"Retrains the family {name} by the calendar.",
        schedule=CronTriggerTimetable(family.cron, timezone=family.timezone),
        catchup=False,
        max_active_runs=1,
        # Of the past nobody knows the champion: Airflow itself refuses a backfill.
        allowed_run_types=["scheduled", "manual", "operator_triggered"],  # type: ignore[list-item]  # as its docs say
        params={"force": FORCE},
        tags=["dropforge", "training"],
        doc_md=DOC.format(name=name, data=f"`{family.data}`", start=family.start),
        default_args={
            "owner": "dropforge",
            **PLAIN_TASK,
            "on_failure_callback": TASK_FAILED,
        },
    ):
        looked: Any = task(multiple_outputs=True)(retrain.look)(
            name, family.model_dump(mode="json", exclude={"intake"})
        )
        run = looked["run"]
        start = StartRunOperator(
            task_id="start", dag_to_start=FINETUNE_DAG, run=run, conf=looked["conf"], note=looked["note"]
        )
        # The run that it waits for tells itself of its failure.
        finetune = AwaitRunOperator(
            task_id="finetune", awaited=FINETUNE_DAG, run=run, on_failure_callback=None, **WAITING_TASK
        )
        late = LateOperator(
            task_id="late",
            awaited=FINETUNE_DAG,
            run=run,
            since=looked["began"],
            limit=looked["limit"],
            told=looked["told"],
            **WAITING_TASK,
        )
        closed: Any = task(trigger_rule="all_done")(retrain.close)(name, looked)
        chain(looked, start, [finetune, late], closed)


for found, its in read_families(families_folder(Path(__file__).parent)).families.items():
    if its.cron is not None:  # else it has rules of intake only
        calendar(found, its)
