"""A job's moments by the clock as it is now: it may have been set since they were first seen."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kubeflow_training.jobs.observation import Observation
from kubeflow_training.jobs.waiting.limits import Limits

_NAMES: Final = ("started", "held_since", "unplaced_since")


class Moments:
    """
    :param limits: whose moments are by the clock as it is when this is made.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._began = limits, _offset()
        self._seen: dict[datetime, float] = {}

    def by_now(self, seen: Observation | None) -> tuple[Limits, Observation | None]:
        """The limits, and the observation with the moments that limits count from, moved as far as the clock was."""
        offset = _offset()
        moved = offset - self._began
        until, queue_until = self._limits.until, self._limits.queue_until
        limits = replace(
            self._limits,
            until=None if until is None else until + moved,
            queue_until=None if queue_until is None else queue_until + moved,
        )
        if seen is None:
            return limits, None
        found = {name: moment for name in _NAMES if (moment := getattr(seen, name)) is not None}
        self._seen = {moment: self._seen.get(moment, offset) for moment in found.values()}
        shifted: dict[str, Any] = {
            name: moment + timedelta(seconds=offset - self._seen[moment]) for name, moment in found.items()
        }
        return limits, replace(seen, **shifted)

    def now_by(self, moment: datetime | None) -> datetime:
        """The present by the clock as it was when a moment was first seen."""
        offset = self._began if moment is None else self._seen.get(moment, self._began)
        return datetime.fromtimestamp(offset + time.monotonic(), UTC)


def _offset() -> float:
    """What changes only when the clock is set, in seconds."""
    return time.time() - time.monotonic()
