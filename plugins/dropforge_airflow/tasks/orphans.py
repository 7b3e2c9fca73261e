"""The reaper's look at MLflow."""

from __future__ import annotations

import logging
from typing import Any

from dropforge import layout
from dropforge.orphans import close_orphans
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge_airflow import connection
from dropforge_airflow.dag_runs import state_of
from dropforge_airflow.tasks import meter

log = logging.getLogger(__name__)


def close(ti: Any = None) -> list[str]:
    """The task: end the MLflow runs of fine-tune runs and sweeps that are over; their names."""
    from dropforge_airflow.assets import FINETUNE_DAG, SWEEP_DAG

    settings = from_env()
    store = connection.open_store(settings.bucket)

    def settle(run: str, mlflow_run: str) -> None:
        try:
            meter.settle(store, RunSpec.read(store, layout.run_key(run)), mlflow_run)
        except Exception as error:  # of another installation, for example: it is ended all the same
            log.warning("what run %s has used is not known: %r", run, error)

    def state(run: str) -> str | None:
        return state_of(ti, FINETUNE_DAG, run) or state_of(ti, SWEEP_DAG, run)

    closed = close_orphans(settings.tracking_uri, state, settle)
    log.info("%d MLflow runs were left open", len(closed))
    return closed
