"""The reaper's look at MLflow."""

from __future__ import annotations

import logging
from typing import Any

from dropforge.orphans import close_orphans
from dropforge.settings import from_env
from dropforge_airflow.dag_runs import state_of

log = logging.getLogger(__name__)


def close(ti: Any = None) -> list[str]:
    """The task: end the MLflow runs of fine-tune runs that are over; their names."""
    from dropforge_airflow.assets import FINETUNE_DAG

    closed = close_orphans(from_env().tracking_uri, lambda run: state_of(ti, FINETUNE_DAG, run))
    log.info("%d MLflow runs were left open", len(closed))
    return closed
