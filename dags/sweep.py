"""Several trials of one recipe, each a run of `dropforge_finetune`; the best one becomes the family's candidate.

The same as `dropforge sweep FILE`. Trials that fall behind are stopped early, if the sweep sets it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, chain, task
from dropforge_airflow.alerts.callbacks import TASK_FAILED
from dropforge_airflow.assets import FINETUNE_DAG, SWEEP_DAG
from dropforge_airflow.form import nested_object
from dropforge_airflow.retries import PLAIN_TASK, WAITING_TASK
from dropforge_airflow.starting import AwaitRunOperator, StartRunOperator
from dropforge_airflow.tasks import sweep
from dropforge_airflow.trials import TrialOperator

WEEK = timedelta(days=7).total_seconds()

with DAG(
    SWEEP_DAG,
    dag_display_name="Dropforge: sweep",
    description="Trains several trials of one recipe; the best becomes the candidate.",
    schedule=None,
    catchup=False,
    params={
        "sweep": Param(
            None,
            "As in a sweep's file: `recipe`, `space`, `trials`, `at_once`, `seed`, `early_stop`.",
            title="Sweep",
            **nested_object(),
        ),
        "drop": Param(None, "As in the form of a run.", type=["string", "null"], title="Drop", maxLength=160),
        "family": Param(None, "As in the form of a run.", type=["string", "null"], title="Family", maxLength=160),
    },
    tags=["dropforge", "training"],
    doc_md=__doc__,
    default_args={
        "owner": "dropforge",
        **PLAIN_TASK,
        "on_failure_callback": TASK_FAILED,
    },
):
    trials: Any = task(sweep.plan)()
    planned = trials["sweep"]
    trial = TrialOperator.partial(
        task_id=sweep.TRIAL,
        awaited=FINETUNE_DAG,
        map_index_template="{{ task.told[:200] }}",  # Airflow's database takes 250 characters
        on_failure_callback=None,  # its run tells itself of its failure
        **WAITING_TASK,
    ).expand_kwargs(trials)
    watch = task.sensor(mode="reschedule", poke_interval=10, timeout=WEEK)(sweep.watch)(planned)
    # Trials may fail, or be stopped early, which is a skip: any rule that wants a success would skip at once.
    best: Any = task(trigger_rule="all_done", multiple_outputs=True)(sweep.best)()
    start = StartRunOperator(
        task_id="start", dag_to_start=FINETUNE_DAG, run=best["run"], conf=best["conf"], note=best["note"]
    )
    candidate = AwaitRunOperator(
        task_id="candidate", awaited=FINETUNE_DAG, run=best["run"], on_failure_callback=None, **WAITING_TASK
    )
    report = task(sweep.report)(planned, best)
    close = task.sensor(mode="reschedule", poke_interval=10, timeout=WEEK, on_failure_callback=None)(sweep.close)()

    chain([trial, watch], best, start, candidate, report, close)
    # A teardown comes also when a person ends the run. It has no setup, which only tasks for `all_success` may follow.
    close.as_teardown(on_failure_fail_dagrun=True)
