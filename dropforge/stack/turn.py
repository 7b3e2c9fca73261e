"""moto's turn: one request at a time is asked and saved; who waits for messages lends it to others meanwhile."""

from __future__ import annotations

import threading
import time


class Turn:
    """A condition whose holder's time is known to others."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._began: list[float] = []

    def __enter__(self) -> None:
        self._condition.acquire()
        self._began.append(time.monotonic())

    def __exit__(self, *_: object) -> None:
        self._began.pop()
        self._condition.release()

    def wait(self, seconds: float) -> None:
        """Lend the turn until somebody notifies, or for so many seconds."""
        began, self._began = self._began, []
        try:
            self._condition.wait(seconds)
        finally:
            self._began = [time.monotonic()] * len(began)

    def notify_all(self) -> None:
        self._condition.notify_all()

    def held(self) -> float:
        """Return for how many seconds the turn has been held by one request; 0 if it is free."""
        began = self._began[:1]
        return time.monotonic() - began[0] if began else 0.0
