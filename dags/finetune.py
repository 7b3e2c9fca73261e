"""From a drop to a registered model: one run per drop, or one started from the form."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, PartitionedAssetTimetable, chain, task
from dropforge_airflow.alerts.callbacks import ASKED, RUN_FAILED, TASK_FAILED
from dropforge_airflow.approve import ApproveOperator
from dropforge_airflow.assets import DROPS, FINETUNE_DAG, MODELS
from dropforge_airflow.confirm import ConfirmOperator
from dropforge_airflow.form import form_fields
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
FIELDS = form_fields(default_preset())
FAMILIES = families_folder(Path(__file__).parent)


def step(body: Callable[..., Any], **arguments: Any) -> Any:
    """A task with this body and its name."""
    return task(multiple_outputs=False, **arguments)(body)


def wait(body: Callable[..., Any], **arguments: Any) -> Any:
    """A task that looks now and then, and occupies no worker in between."""
    return task.sensor(mode="reschedule", **arguments)(body)


with DAG(
    FINETUNE_DAG,
    schedule=PartitionedAssetTimetable(assets=DROPS),
    catchup=False,
    params={name: Param(field.default, field.description, **field.schema) for name, field in FIELDS.items()},
    tags=["dropforge"],
    doc_md=__doc__,
    default_args={
        "owner": "dropforge",
        **PLAIN_TASK,
        "on_failure_callback": TASK_FAILED,
    },
    on_failure_callback=[RUN_FAILED, RUN_ENDED],
):
    planned = step(plan.plan)(str(FAMILIES))
    curated = CurateOperator(task_id="curate", planned=planned, **WAITING_TASK).output
    checked = step(data.check_data)(planned, curated)
    open_run = OpenRunOperator(task_id="open_run", planned=planned, curated=curated, forecast=checked[data.FORECAST])
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
    # Another run of the family may be comparing: its promotion would make this one's verdict void.
    champion = wait(turn.champion, poke_interval=10, timeout=timedelta(days=7))(opened)
    evaluate = MeteredJobOperator(
        task_id="evaluate",
        manifest=opened["evaluate"],
        backend=opened["backend"],
        mlflow_url=opened["mlflow_url"],
        **WAITING_TASK,
    )
    decided = step(promote.decide)(opened)
    approved = ApproveOperator(task_id="approve", opened=opened, notifiers=ASKED, **WAITING_TASK)
    registered = step(promote.register, outlets=[MODELS])(opened)
    reported = step(promote.report)(opened, registered, train.output)
    # It fails because another task did, whose callback has the reason.
    closed = step(run.close_run, on_failure_callback=None)(opened)

    chain(checked, open_run, confirmed, tokenise, train, champion)
    chain(champion, evaluate, decided, approved, registered, reported, closed)
    closed.as_teardown(setups=open_run, on_failure_fail_dagrun=True)
