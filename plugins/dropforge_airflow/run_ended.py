"""What Airflow calls when a run that did not come to its teardown has failed: its slot is given to the next drop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import BaseNotifier

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)


class RunEnded(BaseNotifier):
    """A run has ended: `on_failure_callback` of a DAG. What it cannot do, intake does when it looks again."""

    def notify(self, context: Context) -> None:
        try:
            from dropforge import in_flight
            from dropforge.settings import from_env
            from dropforge_airflow import connection

            run: Any = context.get("dag_run")
            key = getattr(run, "partition_key", None)
            if key:
                in_flight.run_ended(connection.open_store(from_env().bucket), key, run.run_id)
        except Exception as error:
            log.warning("That the run has ended is noted by intake only: %s", error)


RUN_ENDED: Final = RunEnded()
