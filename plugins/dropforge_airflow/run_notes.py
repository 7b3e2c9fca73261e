"""The note of each run in Airflow's lists: which drop it is of, and what came of it.

Airflow calls this in the scheduler, for a task cannot write its run's note. What a person wrote there stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from airflow.listeners import hookimpl

from dropforge.stages import NOTHING_NEW, TEARDOWNS

_DAG: Final = "dropforge_finetune"
_RUN, _RESULT = "Run: ", "Result: "
_LONGEST: Final = 1000  # characters, which Airflow's database takes
_PART: Final = 300  # characters of a name or a reason
#: XCom of a task that failed for a cause that a person can mend: the error's text.
FAILURE: Final = "failure"
_TASKS: Final = ("plan", "decide", "register")


@dataclass(frozen=True)
class Ended:
    """A run as Airflow's database has it.

    :param made: what its tasks returned, by their names; as `NOTHING_NEW`, which run had done it before.
    :param states: of its tasks. :param mlflow: its page there.
    :param failures: of tasks that failed, why they did, as far as it is known.
    """

    made: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    mlflow: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)


def of_drop(key: str | None, conf: Mapping[str, Any]) -> str:
    """What is known of a run as it begins; empty if nothing.

    :param key: partition key of a drop's event. :param conf: of a run that was started otherwise.
    """
    parts = (key or "").split("/")
    named = "/".join(parts[1:3]) if len(parts) == 4 else _text(conf.get("data") or conf.get("drop") or "")
    preset = _text(conf.get("preset") or "")
    return " · ".join(filter(None, (named, preset)))


def of_plan(ended: Ended) -> str:
    """What its plan says that a run is; empty if it has none."""
    plan = ended.made.get("plan")
    if not isinstance(plan, Mapping):
        return ""
    recipe = plan.get("recipe") or {}
    parts = [
        f"{plan.get('family')}/{plan.get('drop')}",
        str((recipe.get("base") or {}).get("model") or ""),
        str((recipe.get("train") or {}).get("method") or ""),
    ]
    page = f"[MLflow]({ended.mlflow})" if ended.mlflow.startswith(("http://", "https://")) else ""
    return " · ".join([*(_text(part) for part in parts if part), *filter(None, [page])])


def result(state: str, ended: Ended) -> str:
    """What came of a run."""
    listed, decided = ended.made.get("register"), ended.made.get("decide")
    failed = sorted(name for name, found in ended.states.items() if found == "failed" and name not in TEARDOWNS)
    skipped = sorted(name for name, found in ended.states.items() if found == "skipped" and name not in TEARDOWNS)
    if state == "success" and isinstance(listed, Mapping):
        word = "promoted" if listed.get("promoted") else "not promoted"
        # The verdict of `decide` may still wait for a person.
        reason = listed.get("reason") or (decided.get("reason") if isinstance(decided, Mapping) else "")
        return f"version {listed.get('version')}, {word}" + (f": {_text(reason)}" if reason else "")
    if failed:
        reason = f": {_text(ended.failures[failed[0]])}" if failed[0] in ended.failures else ""
        return f"failed in `{failed[0]}`{reason}"
    found = ended.made.get(NOTHING_NEW)
    if isinstance(found, Mapping) and "open_run" in skipped:
        return _text(found.get("told"))
    if "plan" in skipped:
        return "nothing to do: the log of `plan` says why"
    return f"ended in `{skipped[0]}`" if skipped else state


def with_line(note: str | None, head: str, text: str) -> str:
    """A note with a line of ours in the place of the one before it; one that would be too long stays as it is."""
    if not text:
        return note or ""
    own = [line for line in (note or "").split("\n") if line and not line.startswith(head)]
    place = 0 if head == _RUN else len(own)
    # Markdown makes one line of two without an empty one between them.
    made = "\n\n".join([*own[:place], f"{head}{text}", *own[place:]])
    return made if len(made) <= _LONGEST else note or ""


@hookimpl
def on_dag_run_running(dag_run: Any, msg: str) -> None:  # noqa: ARG001 - Airflow's names
    if dag_run.dag_id == _DAG:
        _write(dag_run, _RUN, of_drop(dag_run.partition_key, dag_run.conf or {}))


@hookimpl
def on_dag_run_success(dag_run: Any, msg: str) -> None:  # noqa: ARG001 - Airflow's names
    _tell_end(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:  # noqa: ARG001 - Airflow's names
    _tell_end(dag_run)


def _tell_end(dag_run: Any) -> None:
    if dag_run.dag_id != _DAG:
        return
    ended = _look(dag_run)
    _write(dag_run, _RUN, of_plan(ended))
    _write(dag_run, _RESULT, result(str(dag_run.state), ended))


def _write(dag_run: Any, head: str, text: str) -> None:
    note = with_line(dag_run.note, head, text)
    if note and note != dag_run.note:
        dag_run.note = note  # the scheduler commits it with the run's state


def _look(dag_run: Any) -> Ended:
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select
    from sqlalchemy.orm import object_session

    from dropforge_airflow.pages.task import read_failures, xcoms

    session = object_session(dag_run)
    if session is None:
        return Ended()
    place = (dag_run.dag_id, dag_run.run_id)
    columns = (TaskInstance.task_id, TaskInstance.state)
    states = session.execute(select(*columns).where(TaskInstance.dag_id == place[0], TaskInstance.run_id == place[1]))
    made = {task: xcoms(session, *place, task, -1, ("return_value",)).get("return_value") for task in _TASKS}
    opened = xcoms(session, *place, "open_run", -1, ("mlflow_url", NOTHING_NEW))
    ended = {task: str(state) for task, state in states}
    failures = read_failures(session, *place, [task for task, state in ended.items() if state == "failed"])
    made[NOTHING_NEW] = opened.get(NOTHING_NEW)
    return Ended(made, ended, str(opened.get("mlflow_url") or ""), failures)


def _text(value: Any) -> str:
    """A value as one line that Markdown shows as it is."""
    line = " ".join(str(value).split())[:_PART]
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#|!~" else letter for letter in line)
