"""From a drop to a registered model: one run per drop, or one started from the form."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param, PartitionedAssetTimetable, chain, task
from dropforge_airflow.assets import DROPS, FINETUNE_DAG, MODELS
from dropforge_airflow.form import form_fields
from dropforge_airflow.retries import GangBudget
from dropforge_airflow.tasks import data, plan, promote, run, turn
from kubeflow_training.operators import PyTorchJobOperator

FIELDS = form_fields(os.environ.get("DROPFORGE_PRESET", "sample"))

with DAG(
    FINETUNE_DAG,
    schedule=PartitionedAssetTimetable(assets=DROPS),
    catchup=False,
    params={name: Param(field.default, field.description, **field.schema) for name, field in FIELDS.items()},
    tags=["dropforge"],
    doc_md=__doc__,
    default_args={"owner": "dropforge", "retries": 2, "retry_delay": timedelta(seconds=10)},
):
    planned = task(multiple_outputs=False)(plan.plan)()
    curated = task(multiple_outputs=False)(data.curate)(planned)
    checked = task(multiple_outputs=False)(data.check_data)(planned, curated)
    opened = task(multiple_outputs=True)(run.open_run)(planned, curated)

    train = PyTorchJobOperator(
        task_id="train",
        manifest=opened["train"],
        backend=opened["backend"],
        retries=20,  # an upper limit; the recipe's own number is the policy's
        retry_policy=GangBudget("open_run"),
    )
    # Another run of the family may be comparing: its promotion would make this one's verdict void.
    champion = task.sensor(mode="reschedule", poke_interval=10, timeout=timedelta(days=7))(turn.champion)(opened)
    evaluate = PyTorchJobOperator(task_id="evaluate", manifest=opened["evaluate"], backend=opened["backend"])
    decided = task(multiple_outputs=False)(promote.decide)(opened)
    registered = task(multiple_outputs=False, outlets=[MODELS])(promote.register)(opened)
    reported = task(promote.report)(opened, registered)
    closed = task(run.close_run)(opened)

    chain(checked, opened, train, champion, evaluate, decided, registered, reported, closed)
    closed.as_teardown(setups=opened)
