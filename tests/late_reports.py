"""Late reports of Airflow's executor, where a test asks for them: what Airflow then calls a state mismatch.

A copy of this file is an Airflow's `airflow_local_settings.py`, which its scheduler, and so each of its workers, reads.
The executor keeps its report that a task's worker has exited, after which the task waits, until the task was resumed:

- `queued`: until the resumed part is queued, which no worker takes before the scheduler has read the report, and which
  one has been refused before the next try is queued;
- `begun`: until the resumed part runs, which does nothing before the scheduler has read the report;
- `done`: until the resumed part has done all it does, whose result is told after the scheduler has read the report.

A test orders one with `order`; product code knows nothing of it.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

__all__: list[str] = []  # no policy

Point = Literal["queued", "begun", "done"]
POINTS: Final[tuple[Point, ...]] = ("queued", "begun", "done")


class Order(NamedTuple):
    """One task's late report. :param path: its file; what became of it are files beside it."""

    path: Path
    dag: str
    run: str
    task: str
    point: Point

    def mark(self, what: str) -> None:
        self.path.with_suffix(f".{what}").touch()

    def marked(self, what: str) -> bool:
        return self.path.with_suffix(f".{what}").exists()


def order(home: Path, dag: str, run: str, task: str, point: Point) -> Order:
    """Have the first report on a task come late. :param home: Airflow's folder. :param run: text in the run's id."""
    folder = home / "late"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob("*.order")))
    made = folder / f"{number}.tmp"
    made.write_text(json.dumps([dag, run, task, point]))
    made.replace(path := folder / f"{number}.order")
    return Order(path, dag, run, task, point)


def _order_of(dag: str, run: str, task: str) -> Order | None:
    for path in sorted(Path(os.environ["AIRFLOW_HOME"], "late").glob("*.order")):
        found = Order(path, *json.loads(path.read_text()))
        if (found.dag, found.task) == (dag, task) and found.run in run:
            return found
    return None


def _install() -> None:
    from airflow.executors.local_executor import LocalExecutor
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.taskinstancekey import TaskInstanceKey
    from airflow.sdk.execution_time import task_runner
    from airflow.utils.state import TaskInstanceState

    when = TaskInstance.next_retry_datetime
    submit, run = LocalExecutor._process_workloads, task_runner._run_execute_callable
    kept: dict[TaskInstanceKey, tuple[Order, Any]] = {}  # reports that are late
    resumed: dict[TaskInstanceKey, Any] = {}  # workloads that no worker may take yet
    read: list[Order] = []  # whose report the scheduler reads after this look

    def of(key: Any) -> Order | None:
        return _order_of(key.dag_id, key.run_id, key.task_id) if isinstance(key, TaskInstanceKey) else None

    def process_workloads(self: Any, workloads: Any) -> None:
        now = []
        for workload in workloads:
            if workload.key in kept and kept[workload.key][0].point == "queued":
                resumed[workload.key] = self.queued_tasks.pop(workload.key)
                kept[workload.key][0].mark("there")
            else:
                now.append(workload)
        if now:
            submit(self, now)

    def read_results(self: Any) -> None:
        while read:
            read.pop().mark("read")
        for key in [key for key in resumed if key not in kept]:
            workload = resumed.pop(key)
            self.queued_tasks[key] = workload
            submit(self, [workload])
        while not self.result_queue.empty():
            key, state, _ = self.result_queue.get()
            again = of(key)
            if again is not None and again.point == "queued" and again.marked("read"):
                again.mark("refused")
            late = again if state == TaskInstanceState.SUCCESS else None
            if late is not None and not late.marked("late"):
                late.mark("late")
                kept[key] = late, state
            else:
                self.change_state(key, state)
        for key, (late, state) in list(kept.items()):
            if late.marked("there"):
                del kept[key]
                self.change_state(key, state)
                read.append(late)

    def run_execute_callable(context: Any, execute: Any, task: Any) -> Any:
        ti = context["ti"]
        late = _order_of(ti.dag_id, ti.run_id, ti.task_id)
        if late is None or ti._ti_context_from_server.next_method is None or late.marked("read"):
            return run(context, execute, task)
        if late.point == "begun":
            _hold(late)
            return run(context, execute, task)
        try:
            return run(context, execute, task)
        finally:
            _hold(late)

    def next_retry_datetime(ti: Any) -> Any:
        late = _order_of(ti.dag_id, ti.run_id, ti.task_id)
        if late is not None and late.point == "queued" and not late.marked("refused"):
            return datetime.now(UTC) + timedelta(seconds=1)  # else the worker would take the next try for its own
        return when(ti)

    TaskInstance.next_retry_datetime = next_retry_datetime  # type: ignore[method-assign]
    LocalExecutor._process_workloads = process_workloads  # type: ignore[method-assign]
    LocalExecutor._read_results = read_results  # type: ignore[method-assign]
    task_runner._run_execute_callable = run_execute_callable


def _hold(late: Order) -> None:
    """Stand still until the scheduler has read the report."""
    late.mark("there")
    while not late.marked("read"):
        time.sleep(0.05)


if "AIRFLOW_HOME" in os.environ and __name__ == "airflow_local_settings":
    _install()
