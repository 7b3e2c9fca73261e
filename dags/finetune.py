"""From a drop to a registered model: one run per drop, or one started from the form.

| stage | tasks | what comes of it |
|---|---|---|
| data | `plan`, `curate`, `check_data` | the recipe, a dataset version with its card, and what the run would take |
| training | `open_run`, `confirm`, `tokenise`, `train` | an MLflow run, approval of its costs if required, the model |
| evaluation | `champion`, `evaluate`, `decide` | candidate and champion on the same rows, and the verdict |
| release | `approve`, `register`, `report` | approval if required, a version in MLflow, the alias if it is better |

A run starts by itself when a drop is complete, or by hand: **Trigger**, `dropforge submit`, or Airflow's API with the
form's fields:

```json
{"preset": "lora", "data": "support/monday", "recipe": "base: {model: Qwen/Qwen2.5-0.5B}"}
```

Each task has its links under *Details*, and a job its ranks, curves and log under *Training*. A run that failed for
good resumes from its newest checkpoint when its task `train` is cleared, or with `dropforge resume RUN`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, PartitionedAssetTimetable, TaskGroup, chain
from airflow.sdk.configuration import conf
from dropforge_airflow.alerts.callbacks import ASKED, RUN_FAILED, TASK_FAILED
from dropforge_airflow.approve import ApproveOperator
from dropforge_airflow.assets import DROPS, FINETUNE_DAG, MODELS
from dropforge_airflow.confirm import ConfirmOperator
from dropforge_airflow.decorators import DecideTask, RegisterTask, RunTask, step, wait
from dropforge_airflow.form import form_fields
from dropforge_airflow.graph import draw_chain
from dropforge_airflow.operators import (
    CurateOperator,
    MeteredJobOperator,
    OpenRunOperator,
    OptionalJobOperator,
    TrainOperator,
)
from dropforge_airflow.retries import PLAIN_TASK, WAITING_TASK
from dropforge_airflow.run_ended import RUN_ENDED
from dropforge_airflow.tasks import data, plan, promote, run, turn
from kubeflow_training.retries import RetryByCause, SharedBudget

from dropforge.recipes.load import default_preset
from dropforge.settings import families_folder

# The recipe says how many failures a run may have; preemption and eviction, an orderly `dropforge down` too, are none.
RETRIES = RetryByCause(shared=SharedBudget("open_run", "retries", at_most=20, name="compute.retries"))
# A curation may take hours: the tasks of others, and intake, keep places of their own. 0 places are any number.
PLACES = conf.getint("core", "parallelism")
CURATIONS = max(1, PLACES - 2) if PLACES > 0 else None
FIELDS = form_fields(default_preset())
FAMILIES = str(families_folder(Path(__file__).parent))


def stage(name: str, tooltip: str) -> TaskGroup:
    """A part of the graph; its tasks keep their plain names."""
    return TaskGroup(name, prefix_group_id=False, tooltip=tooltip)


with DAG(
    FINETUNE_DAG,
    dag_display_name="Dropforge: fine-tune",
    description="From a drop to a registered model.",
    schedule=PartitionedAssetTimetable(assets=DROPS),
    catchup=False,
    params={name: Param(field.default, field.description, **field.schema) for name, field in FIELDS.items()},
    tags=["dropforge", "training"],
    doc_md=__doc__,
    default_args={
        "owner": "dropforge",
        **PLAIN_TASK,
        "on_failure_callback": TASK_FAILED,
    },
    on_failure_callback=[RUN_FAILED, RUN_ENDED],
) as dag:
    with stage("data", "What is trained on: recipe, dataset version, forecast"):
        planned = step(plan.plan)(FAMILIES)
        curated = CurateOperator(
            task_id="curate", planned=planned, max_active_tis_per_dag=CURATIONS, **WAITING_TASK
        ).output
        checked = step(data.check_data)(planned, curated)

    with stage("training", "An MLflow run, and the jobs that make the model"):
        open_run = OpenRunOperator(
            task_id="open_run", planned=planned, curated=curated, forecast=checked[data.FORECAST]
        )
        opened: Any = open_run.output
        confirmed = ConfirmOperator(task_id="confirm", opened=opened, notifiers=ASKED, **WAITING_TASK)
        tokenise = OptionalJobOperator(
            task_id="tokenise",
            manifest=opened["tokenise"],
            backend=opened["backend"],
            mlflow_url=opened["mlflow_url"],
            **WAITING_TASK,
        )
        train = TrainOperator(
            task_id="train",
            manifest=opened["train"],
            backend=opened["backend"],
            mlflow_url=opened["mlflow_url"],
            log_limit="20 MB",  # the whole log is in the run's folder
            retries=RETRIES.retries + 10,  # the rest pays for lost workers
            retry_policy=RETRIES,
            retry_exponential_backoff=0,  # so many tries in even pauses are longer than five minutes
        )

    with stage("evaluation", "Candidate and champion, measured on the same rows"):
        # Another run of the family may be comparing: its promotion would make this one's verdict void.
        champion = wait(turn.champion, poke_interval=10, timeout=timedelta(days=7))(opened)
        evaluate = MeteredJobOperator(
            task_id="evaluate",
            manifest=opened["evaluate"],
            backend=opened["backend"],
            mlflow_url=opened["mlflow_url"],
            **WAITING_TASK,
        )
        decided = step(promote.decide, DecideTask)(opened, FAMILIES)

    with stage("release", "Approval where it is required, the version, and its alias"):
        approved = ApproveOperator(task_id="approve", opened=opened, families=FAMILIES, notifiers=ASKED, **WAITING_TASK)
        registered = step(promote.register, RegisterTask, outlets=[MODELS])(opened, FAMILIES)
        reported = step(promote.report, RunTask)(opened, registered, train.output, FAMILIES)

    # It fails because another task did, whose callback has the reason.
    closed = step(run.close_run, RunTask, on_failure_callback=None)(opened)
    # Of a run that a person ends before `open_run` the teardown above is skipped with its setup.
    watched = step(run.watcher, on_failure_callback=None)()

    chain(checked, open_run, confirmed, tokenise, train, champion)
    chain(champion, evaluate, decided, approved, registered, reported, [closed, watched])
    closed.as_teardown(setups=open_run, on_failure_fail_dagrun=True)
    watched.as_teardown(on_failure_fail_dagrun=True)
    draw_chain(dag)
