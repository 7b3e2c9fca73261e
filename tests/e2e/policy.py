"""The cluster policy of the tests' Airflow, which strikes tasks where a test asks for it (`tests/e2e/faults.py`).

The stack's folder has a copy as `airflow_local_settings.py`. Airflow calls `task_policy` for each task of a DAG file
that it reads, also in the process that runs one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["task_policy"]

_WRITES = frozenset({"PUT", "POST", "PATCH", "DELETE"})
_QUERIES = ("/search", "/get-")


def task_policy(task: Any) -> None:
    if task.dag_id != "dropforge_finetune":
        return
    task.on_execute_callback = [_arm]
    task.retry_delay, task.retry_exponential_backoff = timedelta(seconds=1), 0
    if type(task.retry_policy).__name__ != "RetryByCause":
        task.retries, task.retry_policy = 40, None  # as many tries as a task has places to be struck at


def _arm(context: Any) -> None:
    """Look whether this execution is to be struck, and where."""
    ti, run = context["ti"], context["dag_run"]
    resumed = getattr(ti._ti_context_from_server, "next_method", None)
    stage = f"{ti.task_id}.resumed" if resumed else ti.task_id
    about = f"{run.run_id} {getattr(run, 'partition_key', None)} {run.conf}"
    for path in sorted(Path(os.environ["AIRFLOW_HOME"], "..", "faults").glob(f"*@{stage}.json")):
        fault = json.loads(path.read_text())
        if fault["match"] in about and not _over(fault):
            _Strike(path, fault, ti.try_number).wait()
            return


def _over(fault: dict[str, Any]) -> bool:
    """A fault ends with its number of strikes, or when each of its ways has struck at the end."""
    ends = [strike["how"] for strike in fault["strikes"] if strike["where"] == "end"]
    return len(fault["strikes"]) >= fault["at_most"] or all(how in ends for how in fault["ways"])


class _Strike:
    """One execution's: after the n-th request that changes something, where n grows from one execution to the next."""

    def __init__(self, path: Path, fault: dict[str, Any], attempt: int) -> None:
        self.path, self.fault, self.attempt = path, fault, attempt
        self.number = len(fault["strikes"]) + 1
        self.how = fault["ways"][(self.number - 1) % len(fault["ways"])]
        self.writes = 0
        self.refusing = False

    def wait(self) -> None:
        import urllib3.connectionpool as pools
        from airflow.sdk.exceptions import TaskAwaitingInput, TaskDeferred
        from airflow.sdk.execution_time import task_runner

        asked, executed = pools.HTTPConnectionPool.urlopen, task_runner._run_execute_callable

        def urlopen(pool: Any, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
            if self.refusing:
                self._refuse()
            answer = asked(pool, method, url, *args, **kwargs)
            if method in _WRITES and not any(word in url for word in _QUERIES):
                self.writes += 1
                if self.writes == self.number:
                    self._now(f"{method} {url.partition('?')[0]}")
            return answer

        def execute(*args: Any) -> Any:
            try:
                result = executed(*args)
            except (TaskDeferred, TaskAwaitingInput):
                self._end()
                raise
            self._end()
            return result

        pools.HTTPConnectionPool.urlopen = urlopen  # type: ignore[method-assign, assignment]
        task_runner._run_execute_callable = execute

    def _end(self) -> None:
        if self.writes < self.number:
            self._now("end")

    def _now(self, where: str) -> None:
        self.fault["strikes"].append({"how": self.how, "where": where, "try": self.attempt})
        made = self.path.with_suffix(".tmp")
        made.write_text(json.dumps(self.fault))
        made.replace(self.path)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.how == "hang":
            time.sleep(1)
        self.refusing = True
        self._refuse()

    def _refuse(self) -> NoReturn:
        """What a client sees whose request was done, and whose line was cut before the answer."""
        from urllib3.exceptions import ProtocolError

        raise ProtocolError("Connection aborted.", ConnectionResetError("the line is cut by a test"))
