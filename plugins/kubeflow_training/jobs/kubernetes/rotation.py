"""Whether a followed log has left out a whole file. Pure.

The node rotates a log's file once it is full: by default beyond 10 MiB, looked at every ten seconds. A follow goes from
its file's end straight on to the newest one, so a reader that is slower than the log never gets those between them. The
API tells at any time how the newest file begins: who passes such a beginning without having met it has left out lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubeflow_training.jobs.kubernetes.cursor import Batch

_TOLERANCE: Final = 10**9  # ns by which stamps of stdout and stderr may run backwards


class Rotation:
    """
    :param at: stamp of the last line that was taken (nanoseconds since 1970); 0 before the first.
    """

    def __init__(self, at: int = 0) -> None:
        self._at = at
        self._beginnings: set[int] = set()

    def begins(self, stamp: int) -> None:
        """The newest file begins with a line of this stamp."""
        if stamp > self._at:
            self._beginnings.add(stamp)

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The batch, cut before each line that was reached by leaving out a file; that part has the gap."""
        gap, start = None, 0
        for index, (stamp, _) in enumerate(batch.marks):
            if self._beginnings and self._leaves_out(stamp):
                if index > start:
                    yield Batch(batch.lines[start:index], batch.marks[start:index], gap)
                gap, start = (self._at, stamp), index
            self._at = stamp
        yield Batch(batch.lines[start:], batch.marks[start:], gap)

    def _leaves_out(self, stamp: int) -> bool:
        self._beginnings.discard(stamp)
        passed = {beginning for beginning in self._beginnings if stamp > beginning + _TOLERANCE}
        self._beginnings -= passed
        return bool(passed)
