"""MLflow runs that nobody will end any more: their DAG run is over, and its last task did not get to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dropforge import tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

_ENDS: dict[str, tracking.Status] = {"success": "FINISHED", "failed": "FAILED"}
_BY = "reaper"
_PAGE = 500


def close_orphans(
    tracking_uri: str,
    state_of: Callable[[str], str | None],
    settle: Callable[[str, str], None] = lambda *_: None,
) -> list[str]:
    """End the MLflow runs of DAG runs that are over; the names of those runs.

    A run whose DAG run is not known stays open: another Airflow may use the same MLflow.

    :param state_of: the state of a DAG run by its id; None if it is not known.
    :param settle: called with name and MLflow run of each, to write down what it has used.
    """
    mlflow = tracking.client(tracking_uri)
    closed: list[str] = []
    # The whole list first: a page begins where the one before ended, and ended runs leave the list.
    for run in list(_running(mlflow)):
        name, dag_run = (
            run.data.tags.get(tracking.TAG_RUN) or str(run.info.run_name),
            run.data.tags[tracking.TAG_DAG_RUN],
        )
        state = state_of(dag_run) if dag_run else None
        status = _ENDS.get(state or "")
        if status is None:
            continue
        settle(name, run.info.run_id)
        tracking.close_run(tracking_uri, run.info.run_id, status, {tracking.TAG_ENDED_BY: _BY})
        log.warning("MLflow run %s (%s) was still open after DAG run %s: %s", run.info.run_id, name, dag_run, status)
        closed.append(name)
    return closed


def _running(mlflow: MlflowClient) -> Iterator[Run]:
    """All open runs that a DAG run opened."""
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    query = f"attributes.status = 'RUNNING' AND tags.`{tracking.TAG_DAG_RUN}` LIKE '%'"
    token: str | None = None
    while experiments:
        page: Any = mlflow.search_runs(experiments, query, max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
