"""The supervisor's parent: if that is killed, what it left behind is ended, and another takes its place.

It writes nothing and knows nothing of services, so that little but a kill can end it; the supervisor ends then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from dropforge.stack import processes

log = logging.getLogger("dropforge.supervisor")

_PR_SET_PDEATHSIG: Final = 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STABLE: Final = 60.0  # seconds after which earlier ends are forgotten
_MOST: Final = 5
_GRACE: Final = 5.0  # seconds
_PAUSE: Final = 0.5


def respawn(supervise: Callable[[], None]) -> int:
    """Run this in a child until it ends well or a signal asks for the end; the exit code.

    One that ends in any other way is followed by another, at most five times within a minute of each other.
    """
    processes.become_subreaper()
    child, asked = 0, False

    def pass_on(number: int, _: object) -> None:
        nonlocal asked
        asked = True
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    ends = 0
    while True:
        begun = time.monotonic()
        code = 1
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it is known whom to pass them on to
        if asked:
            return 1
        parent = os.getpid()
        try:
            child = os.fork()
        except OSError as error:  # as after an end for want of memory
            log.error("no supervisor can be started: %s", error)
        if child == 0 and os.getpid() != parent:
            _end_with(parent)
            supervise()
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if child:
            code, child = os.waitstatus_to_exitcode(_wait(child)), 0
        if code == 0:
            return 0
        ends = 1 if time.monotonic() - begun > _STABLE else ends + 1
        log.error("the supervisor ended with %s; what it left is ended", processes.ending(code))
        processes.end_all(processes.own_descendants, _GRACE)
        processes.reap()
        if ends > _MOST:
            return 1
        time.sleep(_PAUSE)


def _wait(child: int) -> int:
    """How the child ended; other processes that are reaped meanwhile were its orphans."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_with(parent: int) -> None:
    """Have this process get SIGTERM when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot be notified of the parent's end")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
