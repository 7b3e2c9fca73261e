"""SIGTERM: noted at once, obeyed by each rank alone before training, and by all together at a step's end later."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from dropforge.store import wait_no_longer

TOO_EARLY: Final = "asked to stop before training began"
_PR_SET_PDEATHSIG: Final = 1


class PreemptedError(Exception):
    """The run was asked to stop, and did.

    :param step: the newest checkpoint, or None. :param at: the step at which it stopped, if that is another.
    """

    def __init__(self, step: int | None, at: int | None = None, message: str = "") -> None:
        if step is None:
            message = message or "asked to stop before there was a checkpoint"
        elif at is None or at == step:
            message = f"asked to stop at step {step}"
        else:
            message = f"asked to stop at step {at}, and out of time to save it: checkpoint step-{step} is the newest"
        super().__init__(message)
        self.step = step


class StopSignal:
    """Whether this rank was asked to stop, and when.

    A peer's death needs no mark of its own: a stop counts only once all ranks have agreed on it in a collective, and
    that fails when one of them is gone.

    :ivar looks: grows with each look whether to stop, and each micro-batch: a sign of life.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.looks = 0
        self._leave: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def install(self, leave: Callable[[], None] | None = None) -> None:
        """Listen to SIGTERM.

        :param leave: ends this process, called at a signal before `together`. It is called from a thread, because
            Python's own handler waits while the main thread is inside the library that joins the process group.
        """
        signal.signal(signal.SIGTERM, self._note)
        if leave is None:
            return
        self._leave = leave
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()

    def uninstall(self) -> None:
        """Give the signal back, for a process that goes on."""
        self._leave = None
        writer = signal.set_wakeup_fd(-1)
        if writer >= 0:
            os.close(writer)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def together(self) -> None:
        """From now on there is something to save: ranks stop at the end of a step, and all at the same one."""
        with self._lock:
            self._leave = None

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if signal.SIGTERM not in numbers:
                continue
            self.since = self.since or time.monotonic()
            with self._lock:
                if self._leave is not None:
                    self._leave()
        os.close(reader)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.since = self.since or time.monotonic()
        wait_no_longer()

    @property
    def asked(self) -> bool:
        self.looks += 1
        return self.since is not None

    def check(self) -> None:
        """For phases before the first step. :raises PreemptedError: if a stop was asked for; nothing is lost there."""
        if self.asked:
            raise PreemptedError(None, message=TOO_EARLY)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this rank when its launcher is killed: no rank is left behind.

    :param parent: the launcher's process id; without it, one that died before this call goes unseen.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGKILL)
