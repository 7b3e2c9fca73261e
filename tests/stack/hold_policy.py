"""The cluster policy of the tests' Airflow, which holds tasks in the middle of their work (`tests/stack/holds.py`).

The stack's folder has a copy as `airflow_local_settings.py`. Product code knows nothing of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["task_policy"]

# Each task that is held takes a worker. Before the executor is imported, which reads this once.
os.environ["AIRFLOW__CORE__PARALLELISM"] = "16"


def task_policy(task: Any) -> None:
    if task.dag_id in {"dropforge_finetune", "dropforge_intake"}:
        task.on_execute_callback = [_arm]


def _arm(context: Any) -> None:
    """Hold this execution after its first request that was answered, if a file asks for it."""
    ti, run = context["ti"], context["dag_run"]
    about = f"{run.run_id} {getattr(run, 'partition_key', None)}"
    for path in Path(os.environ["AIRFLOW_HOME"], "..", "holds").glob(f"*@{ti.task_id}.hold"):
        if path.name.partition("@")[0] in about:
            _hold_after_a_request(path)


def _hold_after_a_request(path: Path) -> None:
    import urllib3.connectionpool as pools

    asked = pools.HTTPConnectionPool.urlopen

    def urlopen(*args: Any, **kwargs: Any) -> Any:
        answer = asked(*args, **kwargs)
        path.with_suffix(".held").touch()
        while path.exists():
            time.sleep(0.1)
        return answer

    pools.HTTPConnectionPool.urlopen = urlopen  # type: ignore[method-assign]
