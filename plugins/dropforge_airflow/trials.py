"""`TrialOperator`: one trial of a sweep, as a run of the fine-tune DAG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from kubeflow_training.gangs.memory import keep
from kubeflow_training.state_mismatch import first_event_at

from dropforge_airflow.dag_runs import clear_number, state_of
from dropforge_airflow.starting import GOING, AwaitRunOperator, starting

if TYPE_CHECKING:
    from airflow.sdk import Context

    from dropforge.sweeps import Stop

_STARTED: Final = "trial_started"  # key in the task state store


class TrialArguments(TypedDict):
    """What tells one trial from another: arguments of the mapped operator.

    :param run: of the fine-tune DAG, with its `conf`. :param number: from 0. :param told: its values in a few words.
    :param at_once: trials that may train at the same time. :param family, by: whose sweep, and its run in Airflow.
    """

    run: str
    conf: dict[str, Any]
    number: int
    told: str
    at_once: int
    family: str
    by: str


class TrialOperator(AwaitRunOperator):
    """Wait for the trial's turn, start its run or find it, and wait for its end in the triggerer.

    Trials begin in their order, each once enough of those before it have ended. One that fell behind ends skipped, and
    is not tried again; one that failed, or was ended with its sweep, is run again under its name when it is cleared.
    For the arguments see `TrialArguments`.
    """

    # Nothing here is a template: what people wrote into the sweep's file goes to the run as it is.
    template_fields: Sequence[str] = ()

    def __init__(
        self,
        *,
        awaited: str,
        run: str = "",
        conf: Mapping[str, Any] | None = None,
        number: int = 0,
        told: str = "",
        at_once: int = 1,
        family: str = "",
        by: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(awaited=awaited, run=run, **kwargs)
        self.conf, self.number, self.told, self.at_once = conf, number, told, at_once
        self.family, self.by = family, by

    def execute(self, context: Context) -> str:
        self.explain_retry(context)
        state = state_of(context["ti"], self.awaited, self.run)
        if state == "success":
            return state
        if state in GOING:
            self._keep_started(context, clear_number(self.awaited, self.run) - 1)
            return self._wait(context)
        if state == "failed" and self._has_run(context):
            return self.ended(context, state)
        stop = self._stopped()
        if stop is not None and stop.early:
            self._skip(stop)
        self._await_turn(context)
        if stop is not None:
            self._let_go_on()
        self.log.info("Trial %d, %s: run %s", self.number, self.told, self.run)
        note = f"Trial {self.number} of sweep {self.by}: {self.told}"
        start = starting(context, self.awaited, self.run, self.conf, note, again=state == "failed", wait=True)
        self._keep_started(context, -1 if state is None else clear_number(self.awaited, self.run))
        self.note_wait(context)
        raise start

    def turn(self, context: Context, event: Mapping[str, Any]) -> str:  # noqa: ARG002 - Airflow's signature
        """It is this trial's turn, unless others were cleared meanwhile."""
        return self.execute(context)

    def execute_complete(self, context: Context, event: tuple[str, Mapping[str, Any]]) -> str:
        """The name that Airflow calls after it has started a run."""
        return self.resume(context, event)

    def ended(self, context: Context, state: str) -> str:
        stop = None if state == "success" else self._stopped()
        if stop is not None:
            if stop.early:
                self._skip(stop)
            raise AirflowFailException(f"Trial {self.number}: {stop.told}")
        return super().ended(context, state)

    @staticmethod
    def _keep_started(context: Context, clears: int) -> None:
        """Remember that this task runs the trial. :param clears: of the run, which it has more of by then."""
        ti: Any = context["ti"]
        keep(context["task_state_store"], _STARTED, {"of": ti.max_tries, "clears": clears})

    def _has_run(self, context: Context) -> bool:
        """Whether an earlier try has run the trial: only after a clear of this task a failed one runs again."""
        # Not `generation`: that changes, too, when another trial is cleared.
        ti: Any = context["ti"]
        store: Any = context["task_state_store"]
        found = store.get(_STARTED)
        ours = isinstance(found, dict) and found.get("of") == ti.max_tries
        return ours and clear_number(self.awaited, self.run) > found["clears"]

    def _await_turn(self, context: Context) -> None:
        from dropforge_airflow.triggers.turns import ENDED, TurnTrigger

        ti: Any = context["ti"]
        needed = self.number - self.at_once + 1
        # The trial's own earlier end does not count: clearing has taken it away.
        ended = ti.get_ti_count(dag_id=ti.dag_id, task_ids=[self.task_id], run_ids=[ti.run_id], states=list(ENDED))
        if ended < needed:
            self.log.info("Trial %d begins when %d trials have ended; %d have", self.number, needed, ended)
            self.note_wait(context)
            trigger = TurnTrigger(
                dag=ti.dag_id, run=ti.run_id, task=self.task_id, needed=needed, not_before=first_event_at()
            )
            self.defer(trigger=trigger, method_name=self.turn.__name__)

    def _stopped(self) -> Stop | None:
        from dropforge import sweeps
        from dropforge.settings import from_env
        from dropforge_airflow import connection

        return sweeps.stopped(connection.open_store(from_env().bucket), self.family, self.by, self.number)

    def _let_go_on(self) -> None:
        from dropforge import sweeps
        from dropforge.settings import from_env
        from dropforge_airflow import connection

        sweeps.let_go_on(connection.open_store(from_env().bucket), self.family, self.by, self.number)

    def _skip(self, stop: Stop) -> None:
        # Of the exception's text Airflow's log says nothing.
        self.log.info("Trial %d is stopped early: %s", self.number, stop.told)
        raise AirflowSkipException(f"Stopped early: {stop.told}")
