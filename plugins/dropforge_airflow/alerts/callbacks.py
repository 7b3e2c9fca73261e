"""What Airflow calls when a task or a run failed, and when a task asks a person; DAG files name these objects.

A task's callback runs in its own process and knows the reason. A worker that is killed calls nothing, so the DAG's,
which runs in the DAG processor when the run has ended, tells what has not been told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from airflow.sdk import BaseNotifier

from dropforge.stages import TEARDOWNS
from dropforge_airflow.alerts import texts
from dropforge_airflow.alerts.telling import tell
from dropforge_airflow.alerts.texts import Alert, Where
from dropforge_airflow.links import airflow_url

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

_LOST: Final = "nothing was reported before its end: the log of the task, or of the worker, may show more"


class TaskFailed(BaseNotifier):
    """A task failed, and no try is left: `on_failure_callback` of tasks."""

    def notify(self, context: Context) -> None:
        try:
            from kubeflow_training.exceptions import TaskStopped

            from dropforge.errors import DropforgeError

            error: Any = context.get("exception")
            ti = context["ti"]
            if isinstance(getattr(error, "error", None), DropforgeError):
                log.error("%s", error)  # once more, below what Airflow shows of its own code
            if isinstance(error, TaskStopped):
                return  # by a person, of which nobody is told, or with its worker: the run's end will show
            if ended_by_sweep(context.get("dag_run")):
                return
            tell(failure(where(context), ti.task_id, error, ti.try_number), context)
        except Exception:
            log.exception("The failure could not be reported")


class RunFailed(BaseNotifier):
    """A run failed, and none of its tasks has told why: `on_failure_callback` of a DAG."""

    def notify(self, context: Context) -> None:
        try:
            ti: Any = context.get("ti")
            found = where(context)
            states = _states(ti, found) if ti is not None else {}
            if "skipped" in states.values():
                log.info("A user ended the run: no alert is sent")
                return
            if ended_by_sweep(context.get("dag_run")):
                return
            tasks = sorted(task for task, state in states.items() if state == "failed" and task not in TEARDOWNS)
            task = tasks[0] if tasks else str(getattr(ti, "task_id", None) or context.get("reason"))
            tell(texts.failed(found, task, _LOST), context)
        except Exception:
            log.exception("The failure could not be reported")


class Asked(BaseNotifier):
    """A task waits for a person's word: `notifiers` of the operators that ask."""

    def notify(self, context: Context) -> None:
        try:
            task: Any = context["task"]
            limit = task.response_timeout
            alert = texts.approval(
                where(context),
                task.task_id,
                task.subject,
                task.generate_link_to_ui_from_context(context=context),
                None if limit is None else datetime.now(UTC) + limit,
                ", ".join(task.defaults or ()),
            )
            tell(alert, context)
        except Exception:
            log.exception("The question could not be sent")


def ended_by_sweep(run: Any) -> bool:
    """Whether a run of Airflow is a trial that its sweep has ended, which is no failure."""
    conf = dict(getattr(run, "conf", None) or {})
    if not conf.get("sweep"):
        return False

    from dropforge import sweeps
    from dropforge.errors import DataError
    from dropforge.settings import from_env
    from dropforge_airflow import connection

    try:
        by = sweeps.member(conf.get("sweep"))
        if not sweeps.is_trial(by):
            return False
        if sweeps.ended(connection.open_store(from_env().bucket), str(conf.get("family")), by) is None:
            return False
        log.info("The sweep ended this trial: no alert is sent")
        return True
    except DataError:
        return False  # no sweep wrote this
    except Exception as error:  # a store that is away may be what is to be told
        log.warning("Whether the sweep ended this trial cannot be looked up: %s", error)
        return False


def failure(found: Where, task: str, error: BaseException | None, attempt: int) -> Alert:
    """The alert of a task's failure: data that are refused are told as such."""
    from dropforge.errors import DataError, DropforgeError

    mendable = getattr(error, "error", None)
    if isinstance(mendable, DropforgeError):
        cause = f"{mendable.thing}: {mendable.cause}"
        if isinstance(mendable, DataError) and task in {"plan", "curate", "check_data"}:
            return texts.refused_data(found, task, cause, mendable.mend)
        return texts.failed(found, task, cause, mendable.mend, attempt=attempt)
    # A job's last lines are its log's, and may hold rows.
    reason = str(error).partition("\nLast lines of ")[0] if error is not None else ""
    return texts.failed(found, task, reason or (_LOST if error is None else type(error).__name__), attempt=attempt)


def where(context: Any) -> Where:
    """The run that a context is of; what cannot be found out is left out."""
    run: Any = context.get("dag_run")
    dag = str(context["dag"].dag_id)
    name = str(getattr(run, "run_id", None) or context.get("run_id"))
    base = airflow_url()
    planned, given = _pulled(context, "plan", "return_value"), dict(getattr(run, "conf", None) or {})
    planned = planned if isinstance(planned, Mapping) else {}  # a sweep's plan is a list
    family = planned.get("family") or _of_key(run) or given.get("family") or None
    return Where(
        dag=dag,
        run=name,
        clears=int(getattr(run, "clear_number", 0) or 0),
        family=None if family is None else str(family),
        drop=planned.get("drop") or None,
        page=f"{base}/dags/{dag}/runs/{quote(name, safe='')}" if base else "",
        mlflow=str(_pulled(context, "open_run", "mlflow_url") or ""),
    )


def _pulled(context: Any, task: str, key: str) -> Any:
    ti = context.get("ti")
    if ti is None or task not in getattr(context.get("dag"), "task_dict", {}):
        return None
    try:
        return ti.xcom_pull(task_ids=task, key=key)
    except Exception as error:
        log.info("What task %s left cannot be read: %s", task, error)
        return None


def _of_key(run: Any) -> str | None:
    """The family that the event of a drop names."""
    from dropforge.drop import parse_partition_key
    from dropforge.errors import DropforgeError

    try:
        key = getattr(run, "partition_key", None)
        return parse_partition_key(key)["family"] if key else None
    except DropforgeError:
        return None


def _states(ti: Any, found: Where) -> dict[str, str]:
    states = ti.get_task_states(dag_id=found.dag, run_ids=[found.run]).get(found.run, {})
    return {task: str(getattr(state, "value", state)) for task, state in states.items()}


TASK_FAILED: Final = TaskFailed()
RUN_FAILED: Final = RunFailed()
ASKED: Final = Asked()
