"""Lines of a server about what it was sent: of one line each, and so few that whoever sends fills no log.

The embedded store and MLflow have it before their handlers. It decides about no request, and Airflow's server writes
its log by another library.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from dropforge.text import as_line, escape, shorten

_LONGEST: Final = 200  # characters
_LONGEST_TRACE: Final = 10_000
_LINES: Final = 100  # in a minute


class FewLines(logging.Filter):
    """Lets so many records of each logger and level pass in a minute, so that a flood of one kind hides no other.

    The first of a minute tells how many were left out before. A traceback stays below its line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """:param clock: one that only goes on."""
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._passed: dict[tuple[str, int], tuple[float, int]] = {}  # when the minute began, and records since

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now, left_out = (record.name, record.levelno), self._clock(), 0
        with self._lock:
            began, count = self._passed.get(kind, (now, 0))
            if now - began >= 60:
                left_out, began, count = max(0, count - _LINES), now, 0
            self._passed[kind] = began, count + 1
        if count >= _LINES:
            return False
        more = f" ({left_out} more lines like this were left out)" if left_out else ""
        record.msg, record.args = f"{as_line(record.getMessage(), _LONGEST)}{more}", ()
        if record.exc_info and record.exc_info[0] is not None:
            text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_text = shorten(escape(text), _LONGEST_TRACE)
        return True


#: Of lines about what clients of the store sent.
REQUESTS: Final = logging.getLogger("dropforge.requests")
REQUESTS.addFilter(FewLines())


def limit(loggers: Iterable[logging.Logger]) -> None:
    """Have the handlers of these loggers pass few lines."""
    few = FewLines()
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        handler.addFilter(few)
