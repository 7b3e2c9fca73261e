"""The reaper's look at MLflow."""

from __future__ import annotations

import logging
from typing import Any

from dropforge.orphans import close_orphans
from dropforge.settings import from_env

log = logging.getLogger(__name__)


def close(ti: Any = None) -> list[str]:
    """The task: end the MLflow runs of fine-tune runs that are over; their names."""
    from dropforge_airflow.assets import FINETUNE_DAG

    def state_of(dag_run: str) -> str | None:
        try:
            return str(ti.get_dagrun_state(FINETUNE_DAG, dag_run))
        except Exception as error:  # Airflow tells an unknown run by an error of its own
            log.info("DAG run %s is not known here: %s", dag_run, error)
            return None

    closed = close_orphans(from_env().tracking_uri, state_of)
    log.info("%d MLflow runs were left open", len(closed))
    return closed
