"""Was it a person? What Airflow says about a task when somebody wants this process to stop.

`on_kill` also runs when a worker or triggerer merely died or lost its heartbeat. Only the task's state tells which.
"""

from __future__ import annotations

from typing import Any, Final

_ENDED: Final = frozenset({"success", "failed", "skipped", "removed", "upstream_failed"})
_CLEARED_WHILE_RUNNING: Final = "restarting"


def task_state(ti: Any) -> str | None:
    """The state of the task instance in Airflow's database; None is a state too (cleared, or to be scheduled).

    :raises Exception: if Airflow cannot be asked or does not know the task.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
    )
    mapped = ti.map_index is not None and ti.map_index >= 0
    state = states[ti.run_id][f"{ti.task_id}_{ti.map_index}" if mapped else ti.task_id]
    return None if state is None else str(getattr(state, "value", state))


def ended_by_user(state: str | None, *, deferred: bool) -> bool:
    """Whether a person ended the task, so that its job has to go.

    :param deferred: whether the task was waiting in the triggerer. There, no state means cleared; in a worker it may
        also mean that a scheduler died and the task is scheduled again, and then the retry finds its job.
    """
    return state in _ENDED or state == _CLEARED_WHILE_RUNNING or (deferred and state is None)
