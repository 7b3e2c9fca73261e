"""The watcher of the asset `dropforge_asks`: wakes the checkpoints DAG when somebody asks for one in MLflow.

A look is three small requests in a thread; no worker and no DAG run is used up by it. What is asked for stays in
MLflow until it is answered, so an event that is lost costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from dropforge_airflow.triggers.patience import Patience, in_thread

log = logging.getLogger(__name__)


class Reminder:
    """When to wake for what is asked for: at once for what is new, and again after a while for what stays."""

    def __init__(self, again: float) -> None:
        self._again = again
        self._woken: dict[tuple[str, ...], float] = {}

    def due(self, found: list[tuple[str, ...]], now: float) -> bool:
        """:param found: all that is asked for now."""
        self._woken = {ask: self._woken[ask] for ask in found if ask in self._woken}
        late = [ask for ask in found if now - self._woken.get(ask, -self._again) >= self._again]
        self._woken |= dict.fromkeys(late, now)
        return bool(late)


class AskTrigger(BaseEventTrigger):
    """Emits an event when something is asked for; the payload is only how many.

    :param tracking_uri: MLflow's address; `MLFLOW_TRACKING_URI` where the trigger runs, if it is not given.
    :param every: seconds between two looks. :param again: seconds after which it wakes again for the same.
    """

    def __init__(self, *, tracking_uri: str | None = None, every: float = 15.0, again: float = 600.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracking_uri = tracking_uri
        self.every = every
        self.again = again

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "dropforge_airflow.triggers.asks.AskTrigger",
            {"tracking_uri": self.tracking_uri, "every": self.every, "again": self.again},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        patience, reminder = Patience("Looking for asked checkpoints", log), Reminder(self.again)
        while True:
            try:
                found = await in_thread(_look, self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))
                patience.over()
                if reminder.due(found, time.monotonic()):
                    yield TriggerEvent({"asks": len(found)})  # type: ignore[no-untyped-call]
                await asyncio.sleep(self.every)
            except Exception as error:
                await asyncio.sleep(max(self.every, patience.pause(error)))


def _look(uri: str) -> list[tuple[str, ...]]:
    from dropforge import checkpoints
    from dropforge.rest import Rest, speaks_rest

    if not speaks_rest(uri):
        return []
    return [(ask.mlflow_run, ask.model, ask.text) for ask in checkpoints.asks(Rest(uri))]
