"""What Airflow's database knows of a run and of one of its tasks. Nothing of another DAG is ever read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from airflow.models.dagrun import DagRun
from airflow.models.task_state_store import TaskStateStoreModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.taskinstancehistory import TaskInstanceHistory
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from kubeflow_training.gangs.memory import END_KEY, STATE_KEY
from kubeflow_training.published import JOB_KEY
from sqlalchemy import select
from sqlalchemy.orm import Session

from dropforge import layout
from dropforge.stages import JOBS, STAGES, TEARDOWNS
from dropforge_airflow.run_notes import FAILURE

_AT_WORK: Final = frozenset({"running", "deferred", "queued", "up_for_retry"})
_OPEN: Final = "open_run"
_OPENED: Final = ("run", "family", "mlflow_run", "backend")
_MOST_TRIES: Final = 50


@dataclass(frozen=True)
class Try:
    """One try of a task. :param why: why it was tried again, if its retry policy said so."""

    number: int
    state: str
    began: datetime | None
    ended: datetime | None
    why: str = ""


@dataclass(frozen=True)
class Stage:
    """A task of the run, with all its tries."""

    name: str
    state: str
    tries: int
    began: datetime | None
    ended: datetime | None


@dataclass(frozen=True)
class Seen:
    """A run of the fine-tune DAG, and one of its tasks.

    :param opened: run, family, mlflow_run and backend, as task `open_run` returned them; empty before that.
    :param job: where the task's newest job is: name, namespace, uid, kind, backend; empty if it has none.
    :param result: how that job ended, as the task remembers it; empty if it does not.
    :param failures: why its tasks failed, as far as they have said.
    """

    dag: str
    dag_run: str
    state: str
    task: str
    map_index: int
    stages: tuple[Stage, ...]
    tries: tuple[Try, ...]
    opened: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ("success", "failed")


def see(dag: str, dag_run: str, task: str | None, map_index: int) -> Seen | None:
    """The run and the task; None if this DAG has no such run, or the run no such task.

    :param task: else the one whose job is at work, or was last.
    """
    with create_session(scoped=False) as session:
        run = session.execute(
            select(DagRun.id, DagRun.state).where(DagRun.dag_id == dag, DagRun.run_id == dag_run)
        ).first()
        if run is None:
            return None
        stages = _stages(session, dag, dag_run)
        chosen = task or _at_work(stages)
        tries = _tries(session, dag, dag_run, chosen, map_index)
        if task is not None and not tries:
            return None
        job, result = _job(session, run.id, dag, dag_run, chosen, map_index)
        opened = _opened(session, dag, dag_run)
        failures = read_failures(session, dag, dag_run, [one.name for one in stages if one.state == "failed"])
    return Seen(dag, dag_run, str(run.state), chosen, map_index, stages, tries, opened, job, result, failures)


def states(dag: str, dag_runs: Sequence[str]) -> dict[str, str]:
    """The states of these runs of the DAG, without those that it has not."""
    with create_session(scoped=False) as session:
        rows = session.execute(
            select(DagRun.run_id, DagRun.state).where(DagRun.dag_id == dag, DagRun.run_id.in_(dag_runs))
        )
        return {run: str(state) for run, state in rows}


def _stages(session: Session, dag: str, dag_run: str) -> tuple[Stage, ...]:
    """All tasks in the order of the pipeline; of a mapped one the first."""
    columns = (
        TaskInstance.task_id,
        TaskInstance.state,
        TaskInstance.try_number,
        TaskInstance.start_date,
        TaskInstance.end_date,
    )
    rows = session.execute(
        select(*columns)
        .where(TaskInstance.dag_id == dag, TaskInstance.run_id == dag_run)
        .order_by(TaskInstance.map_index.desc())
    )
    order = {name: place for place, name in enumerate(STAGES)}
    found = {row[0]: Stage(row[0], str(row[1] or ""), row[2] or 0, row[3], row[4]) for row in rows}
    return tuple(sorted(found.values(), key=lambda stage: (order.get(stage.name, len(order)), stage.name)))


def _at_work(stages: tuple[Stage, ...]) -> str:
    """The task whose job is at work, else the first that failed, else the last that had a job, else the training."""
    of = {stage.name: stage for stage in stages}
    jobs = [of[name] for name in JOBS if name in of]
    working = next((stage.name for stage in jobs if stage.state in _AT_WORK), None)
    failed = next((stage.name for stage in stages if stage.state == "failed" and stage.name not in TEARDOWNS), None)
    begun = [stage.name for stage in jobs if stage.began is not None and stage.name != "tokenise"]
    return working or failed or (begun[-1] if begun else "train")


def _tries(session: Session, dag: str, dag_run: str, task: str, map_index: int) -> tuple[Try, ...]:
    found: dict[int, Try] = {}
    for model in (TaskInstanceHistory, TaskInstance):  # the present one counts
        rows = session.execute(
            select(model.try_number, model.state, model.start_date, model.end_date, model.retry_reason)
            .where(model.dag_id == dag, model.run_id == dag_run, model.task_id == task, model.map_index == map_index)
            .order_by(model.try_number.desc())
            .limit(_MOST_TRIES)
        )
        found |= {row[0]: Try(row[0], str(row[1] or ""), row[2], row[3], str(row[4] or "")) for row in rows}
    return tuple(found[number] for number in sorted(found))[-_MOST_TRIES:]


def _opened(session: Session, dag: str, dag_run: str) -> dict[str, str]:
    values = xcoms(session, dag, dag_run, _OPEN, -1, _OPENED)
    found = {key: value for key, value in values.items() if isinstance(value, str)}
    # It becomes a part of keys in the bucket.
    return found if layout.is_run(found.get("run", "")) else {}


def _job(
    session: Session, run: int, dag: str, dag_run: str, task: str, map_index: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where the newest job is, and its result: what was published, else what the task remembers between tries."""
    published = xcoms(session, dag, dag_run, task, map_index, (JOB_KEY,)).get(JOB_KEY)
    rows = session.execute(
        select(TaskStateStoreModel.key, TaskStateStoreModel.value).where(
            TaskStateStoreModel.dag_run_id == run,
            TaskStateStoreModel.task_id == task,
            TaskStateStoreModel.map_index == map_index,
            TaskStateStoreModel.key.in_((STATE_KEY, END_KEY)),
        )
    )
    kept = {key: _mapping(value) for key, value in rows}
    job = published if isinstance(published, dict) else kept.get(STATE_KEY, {})
    end = kept.get(END_KEY, {})
    result = end.get("result") if job.get("uid") and end.get("uid") == job.get("uid") else None
    return job, result if isinstance(result, dict) else {}


def read_failures(session: Session, dag: str, dag_run: str, tasks: Iterable[str]) -> dict[str, str]:
    """Why tasks of a run failed, as far as they have said."""
    said = {task: xcoms(session, dag, dag_run, task, -1, (FAILURE,)).get(FAILURE) for task in tasks}
    return {task: str(text) for task, text in said.items() if text}


def xcoms(session: Session, dag: str, dag_run: str, task: str, map_index: int, keys: tuple[str, ...]) -> dict[str, Any]:
    rows = session.execute(
        select(XComModel.key, XComModel.value).where(
            XComModel.dag_id == dag,
            XComModel.run_id == dag_run,
            XComModel.task_id == task,
            XComModel.map_index == map_index,
            XComModel.key.in_(keys),
        )
    )
    return {key: _plain(value) for key, value in rows}


def _plain(value: Any) -> Any:
    """An XCom as the database has it: JSON, once or twice."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _mapping(value: Any) -> dict[str, Any]:
    found = _plain(value)
    return found if isinstance(found, dict) else {}
