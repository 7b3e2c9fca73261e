"""Operators for runs of other DAGs: start one or find it started, wait for its end, tell if it is late."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSkipException,
    DagRunTriggerException,
    TaskDeferralTimeout,
)
from kubeflow_training.state_mismatch import ResumableTask, first_event_at, report_seconds

from dropforge_airflow.dag_runs import state_of

if TYPE_CHECKING:
    from airflow.sdk import Context

GOING: Final = frozenset({"queued", "running"})
ENDED: Final = frozenset({"success", "failed"})
_POLL: Final = 5  # seconds
_NOTE: Final = 1000  # characters, the most that Airflow's database takes


class StartRunOperator(BaseOperator):
    """Start a DAG run of a given name, whatever happened to earlier tries: never a second one.

    A run that goes on or has succeeded is taken as it is, one that failed is run again under its name.
    Airflow's own `TriggerDagRunOperator` fails where the run exists, or clears it while it runs.

    :param dag: the DAG's id. :param run: the run's. :param conf: its configuration. :param note: shown on its page.
    """

    template_fields: Sequence[str] = ("run", "conf", "note")

    def __init__(self, *, dag_to_start: str, run: Any, conf: Any, note: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dag_to_start, self.run, self.conf, self.note = dag_to_start, run, conf, note

    def execute(self, context: Context) -> str:
        state = state_of(context["ti"], self.dag_to_start, self.run)
        if state in GOING or state == "success":
            self.log.info("Run %s of %s is there: %s", self.run, self.dag_to_start, state)
            return str(self.run)
        raise starting(context, self.dag_to_start, self.run, self.conf, self.note, again=state == "failed")


def starting(
    context: Context, dag: str, run: Any, conf: Any, note: Any, *, again: bool, wait: bool = False
) -> DagRunTriggerException:
    """What a task raises to start a DAG run. :param again: it failed, and is run again under its name.

    :param wait: the task then waits in the triggerer, and goes on in its method `execute_complete`.
    :raises AirflowFailException: if the DAG is paused.
    """
    if context["ti"].get_dag(dag).is_paused:
        raise AirflowFailException(f"DAG {dag}: it is paused, so run {run} would wait. Unpause it, and clear this task")
    return DagRunTriggerException(
        trigger_dag_id=dag,
        dag_run_id=run,
        conf=conf,
        note=None if note is None else str(note)[:_NOTE],
        reset_dag_run=again,
        skip_when_already_exists=False,
        wait_for_completion=wait,
        allowed_states=["success"] if wait else [],
        failed_states=["failed"] if wait else [],
        # Airflow's own trigger looks at once and then so often: not as early as a state mismatch is likely.
        poke_interval=math.ceil(report_seconds()) if wait else _POLL,
        deferrable=wait,
    )


class AwaitRunOperator(ResumableTask, BaseOperator):
    """Wait for a DAG run's end in the triggerer, and end as it does.

    :param awaited: the DAG's id. :param run: the run's.
    """

    template_fields: Sequence[str] = ("run",)

    def __init__(self, *, awaited: str, run: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.awaited, self.run = awaited, run

    def execute(self, context: Context) -> str:
        self.explain_retry(context)
        return self._wait(context)

    def resume(self, context: Context, event: tuple[str, Mapping[str, Any]]) -> str:
        """The run has ended. :raises AirflowFailException: if it failed."""
        return self.ended(context, str(event[1].get(self.run)))

    def ended(self, context: Context, state: str) -> str:  # noqa: ARG002 - for subclasses
        """Return the run's state. :raises AirflowFailException: if it failed."""
        if state != "success":
            raise AirflowFailException(f"Run {self.run} of {self.awaited}: it {state}. Its tasks' logs say why")
        return state

    def _wait(self, context: Context, seconds: float | None = None) -> str:
        """Wait in the triggerer, unless the run has ended."""
        from dropforge_airflow.triggers.runs import RunEndTrigger

        state = state_of(context["ti"], self.awaited, self.run)
        if state is None:
            raise AirflowFailException(
                f"Run {self.run} of {self.awaited}: it is not there. Clear the task that starts it"
            )
        self.log.info("Run %s of %s is %s", self.run, self.awaited, state)
        if state not in ENDED:
            self.note_wait(context)
            self.defer(
                trigger=RunEndTrigger(self.awaited, str(self.run), sorted(ENDED), _POLL, not_before=first_event_at()),
                method_name="resume",
                timeout=None if seconds is None else timedelta(seconds=seconds),
            )
        return self.ended(context, state)


class LateOperator(AwaitRunOperator):
    """Fails, while the run goes on, when it takes longer than it may: what Airflow does at failed tasks tells people.

    :param since: Unix time from which the run's time counts. :param limit: seconds that it may take; None skips.
    :param told: why so long, in a sentence.
    """

    template_fields: Sequence[str] = ("run", "since", "limit", "told")

    def __init__(self, *, since: Any, limit: Any, told: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.since, self.limit, self.told = since, limit, told

    def execute(self, context: Context) -> str:
        if self.limit is None:
            context["ti"].xcom_push(key="reason", value=self.told)
            self.log.info("Nothing to compare with: %s", self.told)
            raise AirflowSkipException(f"Nothing to compare with: {self.told}")
        self.explain_retry(context)
        self.log.info("The run counts as late after %.0f s: %s", self.limit, self.told)
        left = min(self.since + self.limit - time.time(), self.limit)  # the clock may have been set back
        if left <= 0 and state_of(context["ti"], self.awaited, self.run) in GOING:
            self._late(context)
        # A wait that ends at once would be a state mismatch, as an event at once would.
        return self._wait(context, max(left, report_seconds()))

    def ended(self, context: Context, state: str) -> str:  # noqa: ARG002 - how it ended is not our matter
        return "on time"

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            self.note_wait(context)  # the failure that follows is the task's end, not a try's
            self._late(context)

    def _late(self, context: Context) -> NoReturn:
        reason = f"run {self.run} has taken {max(0.0, time.time() - self.since):.0f} s and has not ended; {self.told}"
        context["ti"].xcom_push(key="reason", value=reason)
        raise AirflowFailException(f"Late: {reason}. It continues; end it on its page if it hangs") from None
