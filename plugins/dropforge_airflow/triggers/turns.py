"""Waits until so many of a mapped task's instances have ended that it is the next one's turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent
from kubeflow_training.state_mismatch import reach

ENDED: Final = ("success", "failed", "skipped", "upstream_failed", "removed")
_LONGEST: Final = 30.0  # seconds between two looks


class TurnTrigger(BaseTrigger):
    """Fires when `needed` instances of a task have ended in a DAG run.

    :param every: seconds between two looks, for each end that is missing: who is far behind asks seldom.
    :param not_before: Unix time before which no event comes, see `state_mismatch.first_event_at`.
    """

    def __init__(
        self, *, dag: str, run: str, task: str, needed: int, every: float = 3.0, not_before: float | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.not_before = not_before
        self.dag, self.run_id, self.task_name, self.needed, self.every = dag, run, task, needed, every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "dropforge_airflow.triggers.turns.TurnTrigger",
            {
                "dag": self.dag,
                "run": self.run_id,
                "task": self.task_name,
                "needed": self.needed,
                "every": self.every,
                "not_before": self.not_before,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        while True:
            # Off the event loop, and in the thread that Airflow's own triggers ask from.
            ended = await sync_to_async(RuntimeTaskInstance.get_ti_count)(
                dag_id=self.dag, task_ids=[self.task_name], run_ids=[self.run_id], states=list(ENDED)
            )
            if ended >= self.needed:
                await reach(self.not_before)
                yield TriggerEvent({"ended": ended})  # type: ignore[no-untyped-call]
                return
            await asyncio.sleep(min(_LONGEST, self.every * (self.needed - ended)))
