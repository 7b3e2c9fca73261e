"""Waits for the end of a DAG run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.providers.standard.triggers.external_task import DagStateTrigger
from airflow.triggers.base import TriggerEvent
from kubeflow_training.state_mismatch import reach


class RunEndTrigger(DagStateTrigger):
    """Airflow's own trigger for one run, whose event does not come too early.

    :param states: of the run that end the waiting. :param poll_interval: seconds between two looks.
    :param not_before: Unix time before which no event comes, see `state_mismatch.first_event_at`.
    """

    def __init__(self, dag: str, run: str, states: Sequence[str], poll_interval: float, not_before: float) -> None:
        super().__init__(dag_id=dag, states=list(states), run_ids=[run], poll_interval=poll_interval)  # type: ignore[arg-type]
        self.not_before = not_before

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments."""
        return (
            "dropforge_airflow.triggers.runs.RunEndTrigger",
            {
                "dag": self.dag_id,
                "run": (self.run_ids or [""])[0],
                "states": self.states,
                "poll_interval": self.poll_interval,
                "not_before": self.not_before,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the run's state once it has ended."""
        async for event in super().run():
            await reach(self.not_before)
            yield event
