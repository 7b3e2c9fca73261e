"""What a task can ask about other DAG runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

log = logging.getLogger(__name__)

ACTIVE: Final = ["queued", "running"]
_ASKED: Final = 50  # runs in one question, whose ids stand in an address


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


def going(ti: Any, dag: str, runs: Sequence[str]) -> set[str]:
    """Which of some DAG runs have not ended; all of those of which Airflow cannot say it now."""
    from airflow.sdk.exceptions import AirflowRuntimeError

    found: set[str] = set()
    for some in (runs[start : start + _ASKED] for start in range(0, len(runs), _ASKED)):
        try:
            if ti.get_dr_count(dag, run_ids=list(some), states=ACTIVE) == len(some):
                found |= set(some)
                continue
            found |= {run for run in some if ti.get_dr_count(dag, run_ids=[run], states=ACTIVE)}
        except AirflowRuntimeError as error:
            log.warning("Which runs of DAG %s have ended cannot be asked: %s", dag, error)
            found |= set(some)
    return found


def clear_number(dag: str, run: str) -> int:
    """Return how often a DAG run has been cleared, by people or to be run again.

    :raises AirflowRuntimeError: if Airflow cannot say, or knows no such run.
    """
    from airflow.sdk.execution_time.comms import GetDagRun
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    found: Any = SUPERVISOR_COMMS.send(GetDagRun(dag_id=dag, run_id=run))
    return int(found.clear_number or 0)
