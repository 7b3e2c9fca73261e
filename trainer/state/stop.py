"""SIGTERM: noted at once, obeyed at a step's end by all ranks together."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import FrameType
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


class PreemptedError(Exception):
    """The run was asked to stop, and did. :param step: the checkpoint that was written, or None."""

    def __init__(self, step: int | None) -> None:
        super().__init__("asked to stop before the first step" if step is None else f"asked to stop at step {step}")
        self.step = step


class StopSignal:
    """Whether this rank was asked to stop, and when.

    A peer's death needs no mark of its own: a stop counts only once all ranks have agreed on it in a collective, and
    that fails when one of them is gone.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.since = self.since or time.monotonic()

    @property
    def asked(self) -> bool:
        return self.since is not None

    def check(self) -> None:
        """For phases before the first step. :raises PreemptedError: if a stop was asked for; nothing is lost there."""
        if self.asked:
            raise PreemptedError(None)


def die_with_parent() -> None:
    """Have the kernel end this rank when its launcher is killed: no rank is left behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
