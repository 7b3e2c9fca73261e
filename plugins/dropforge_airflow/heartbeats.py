"""Airflow's processes tell that they live after the clock was set back, too.

Airflow 3.3 beats again when a time has passed since the last beat. One in the future silences scheduler, triggerer and
DAG processor until the clock has come to it: they count as dead, and the scheduler takes its own tasks for orphans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.listeners import hookimpl

_RUNNERS: Final = ("scheduler_job_runner", "triggerer_job_runner", "dag_processor_job_runner")


class Beat:
    """Airflow's `perform_heartbeat`, for which no last beat is in the future."""

    def __init__(self, perform: Callable[..., None]) -> None:
        self._perform = perform

    def __call__(self, job: Any, *arguments: Any, **named: Any) -> None:
        now = datetime.now(UTC)
        if job.latest_heartbeat is not None and job.latest_heartbeat > now:
            job.latest_heartbeat = now - timedelta(seconds=job.heartrate)
        self._perform(job, *arguments, **named)


@hookimpl
def on_starting(component: Any) -> None:  # noqa: ARG001 - Airflow's name for what starts
    for name in _RUNNERS:
        runner = sys.modules.get(f"airflow.jobs.{name}")
        perform = getattr(runner, "perform_heartbeat", None)
        if perform is not None and not isinstance(perform, Beat):
            runner.perform_heartbeat = Beat(perform)  # type: ignore[union-attr]
