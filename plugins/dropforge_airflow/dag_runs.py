"""What a task can ask about other DAG runs."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

log = logging.getLogger(__name__)


def state_of(ti: Any, dag: str, run: str) -> str | None:
    """The state of a DAG run, such as `failed`; None if this Airflow knows no such run.

    :raises AirflowRuntimeError: if Airflow cannot say now, from which nothing follows.
    """
    from airflow.sdk.exceptions import AirflowRuntimeError

    try:
        state = ti.get_dagrun_state(dag, run)
    except AirflowRuntimeError as error:
        if (error.error.detail or {}).get("status_code") != 404:
            raise
        log.info("DAG run %s is not known here", run)
        return None
    # In a task it is an Enum, whose str() is not its value.
    return str(state.value if isinstance(state, Enum) else state)


def clear_number(dag: str, run: str) -> int:
    """Return how often a DAG run has been cleared, by people or to be run again.

    :raises AirflowRuntimeError: if Airflow cannot say, or knows no such run.
    """
    from airflow.sdk.execution_time.comms import GetDagRun
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    found: Any = SUPERVISOR_COMMS.send(GetDagRun(dag_id=dag, run_id=run))
    return int(found.clear_number or 0)
