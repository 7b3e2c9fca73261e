"""What Airflow calls a state mismatch: it ends a task that was just resumed, and tries it again.

When a task defers or waits for a person, its worker exits, and the executor reports that exit as a success. If the task
is resumed before the scheduler has read the report, Airflow 3.3 takes it for the end of the resumed part
(apache/airflow issues 66374, 67287, 71580, 72716). Triggers here keep their first event until the report has most
probably been read, and an operator whose try was ended this way says so in the next one. That the next try does no harm
is each operator's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
    DagRunTriggerException,
)

from kubeflow_training.exceptions import TaskStopped
from kubeflow_training.gangs.memory import keep
from kubeflow_training.retries import generation

if TYPE_CHECKING:
    from airflow.sdk import Context

WAITING_KEY: Final = "waiting_try"
"""Key of the try that waits, or was resumed and has not failed by itself, in the task state store."""
_SCHEDULER: Final = 5.0  # seconds in which a scheduler that has enough to do reads a report


def report_seconds() -> float:
    """Return how long after a task has begun to wait the executor's report has most probably been read.

    A worker may notice the exit of the task's process as late as `[workers] min_heartbeat_interval` seconds after it.
    """
    from airflow.sdk.configuration import conf

    noticed: float = conf.getfloat("workers", "min_heartbeat_interval")
    return noticed + _SCHEDULER


def first_event_at() -> float:
    """Return the Unix time before which the trigger of a task that defers now should be silent."""
    return time.time() + report_seconds()


async def reach(moment: float | None) -> None:
    """Sleep until what `first_event_at` returned; not at all if there is none, and never longer than it is away."""
    if moment is not None:
        await asyncio.sleep(max(0.0, min(moment - time.time(), report_seconds())))


class ResumableTask:
    """A mixin for operators that defer or wait: a try says in its log if Airflow ended the one before.

    `execute` calls `explain_retry` first, and `note_wait` right before it gives its worker away.
    """

    log: Any

    def note_wait(self, context: Context) -> None:
        """Remember that this try waits."""
        _keep(context, context["ti"].try_number)

    def explain_retry(self, context: Context) -> None:
        """Log a warning if the try before waited and did not fail by itself."""
        store: Any = context["task_state_store"]
        found, before = store.get(WAITING_KEY), context["ti"].try_number - 1
        if isinstance(found, dict) and found == {"of": generation(context), "try": before}:
            self.log.warning(
                "Try %d waited, and Airflow ended it as it was resumed, although it had not failed: on a late report "
                "of the executor (the task's event `state mismatch` shows it), or its worker was lost. This try "
                "continues from what is there",
                before,
            )

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Go on after the wait. What a subclass does before, it does within `own_failures`."""
        with self.own_failures(context):
            return super().resume_execution(next_method, next_kwargs, context)  # type: ignore[misc]

    @contextmanager
    def own_failures(self, context: Context) -> Iterator[None]:
        """Remember that a resumed part failed by itself: that is no mismatch."""
        try:
            yield
        except (TaskStopped, AirflowSkipException, AirflowFailException, DagRunTriggerException):
            # It waits again, or no other try follows unless Airflow did not take this one's end.
            raise
        except (Exception, AirflowTaskTimeout):
            try:
                _keep(context, 0)
            except Exception as error:  # it must not take the place of what went wrong
                self.log.warning("that this try failed by itself could not be kept: %r", error)
            raise


def _keep(context: Context, number: int) -> None:
    keep(context["task_state_store"], WAITING_KEY, {"of": generation(context), "try": number})
