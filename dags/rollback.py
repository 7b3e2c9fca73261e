"""A family's alias goes back to the version that held it before, or to the one that is named.

The same as `dropforge rollback FAMILY`. Nothing is trained or deleted; the previous champion is marked with the
reason and is not promoted again, unless it is named here.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task
from dropforge_airflow.alerts.callbacks import RUN_FAILED, TASK_FAILED
from dropforge_airflow.assets import MODELS, ROLLBACK_DAG
from dropforge_airflow.tasks import rollback

from dropforge.settings import families_folder

FAMILIES = str(families_folder(Path(__file__).parent))

with DAG(
    ROLLBACK_DAG,
    dag_display_name="Dropforge: roll back",
    description="Moves the alias of a family back to an earlier version.",
    schedule=None,
    catchup=False,
    params={
        "family": Param(
            type="string",
            title="Family",
            description="The model family, as its drops and its registered model are called.",
            minLength=1,
            maxLength=40,
        ),
        "version": Param(
            None,
            "Number of the version that gets the alias; empty for the one that held it before.",
            type=["string", "null"],
            title="Version",
            pattern="^[0-9]*$",
        ),
        "reason": Param(
            type="string",
            title="Reason",
            description="Why. It is shown on the version that loses the alias.",
            minLength=1,
            maxLength=500,
        ),
        "alias": Param("champion", "The alias to move.", type="string", title="Alias", minLength=1, maxLength=100),
    },
    tags=["dropforge", "release"],
    doc_md=__doc__,
    default_args={
        "owner": "dropforge",
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "on_failure_callback": TASK_FAILED,
    },
    on_failure_callback=RUN_FAILED,
):
    chosen: Any = task(rollback.choose)(FAMILIES)
    moved: Any = task(outlets=[MODELS])(rollback.move)
    moved(chosen, FAMILIES)
