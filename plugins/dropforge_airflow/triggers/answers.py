"""Looks up the answer to a question that an earlier try of a task has asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from airflow.triggers.base import BaseTrigger, TriggerEvent
from kubeflow_training.state_mismatch import reach


class AnswerTrigger(BaseTrigger):
    """Tells once whether the task's question has been answered. A worker cannot ask Airflow that; a triggerer can.

    The event is a dictionary: `answered`, and if so `chosen_options`, `by` and `id` (a user's name and id, or None),
    `at` (ISO 8601).

    :param task_instance_id: which has the question.
    :param not_before: Unix time before which no event comes, see `state_mismatch.first_event_at`.
    """

    def __init__(self, *, task_instance_id: str, not_before: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.task_instance_id, self.not_before = task_instance_id, not_before

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments."""
        return (
            "dropforge_airflow.triggers.answers.AnswerTrigger",
            {"task_instance_id": self.task_instance_id, "not_before": self.not_before},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield what Airflow knows of the answer."""
        from airflow.sdk.execution_time.hitl import get_hitl_detail_content_detail
        from asgiref.sync import sync_to_async

        await reach(self.not_before)
        # Off the event loop, and in the thread that Airflow's own triggers ask from.
        shown = await sync_to_async(get_hitl_detail_content_detail)(ti_id=UUID(self.task_instance_id))
        event: dict[str, Any] = {"answered": bool(shown.response_received and shown.responded_at)}
        if event["answered"] and shown.responded_at is not None:
            user = shown.responded_by_user
            event |= {
                "chosen_options": list(shown.chosen_options or []),
                "by": None if user is None else str(user.name or user.id),
                "id": None if user is None else str(user.id),
                "at": shown.responded_at.isoformat(),
            }
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]
