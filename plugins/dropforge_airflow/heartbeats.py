"""Airflow's processes tell that they live also right after the clock was set.

Airflow 3.3 beats again when a time has passed since the last beat, and writes down the moment of the one before. So a
clock that is set back silences scheduler, triggerer and DAG processor until it has come to the last beat again, and
after one that is set forward they look dead for seconds. The scheduler then takes its own tasks for orphans.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.listeners import hookimpl

_RUNNERS: Final = ("scheduler_job_runner", "triggerer_job_runner", "dag_processor_job_runner")


class Beat:
    """Airflow's `perform_heartbeat`, which beats at once when the clock was set."""

    def __init__(self, perform: Callable[..., None]) -> None:
        self._perform = perform
        self._clock = time.time() - time.monotonic()

    def __call__(self, job: Any, *arguments: Any, **named: Any) -> None:
        clock = time.time() - time.monotonic()
        if abs(clock - self._clock) > 1:
            self._clock = clock
            job.latest_heartbeat = datetime.now(UTC) - timedelta(seconds=job.heartrate)
        self._perform(job, *arguments, **named)


@hookimpl
def on_starting(component: Any) -> None:  # noqa: ARG001 - Airflow's name for what starts
    for name in _RUNNERS:
        runner = sys.modules.get(f"airflow.jobs.{name}")
        perform = getattr(runner, "perform_heartbeat", None)
        if perform is not None and not isinstance(perform, Beat):
            runner.perform_heartbeat = Beat(perform)  # type: ignore[union-attr]
