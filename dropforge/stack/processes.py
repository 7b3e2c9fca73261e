"""Whose process is it? Finding and ending everything a stack has started, however it renamed or re-parented itself.

The supervisor is the reaper of its descendants (PR_SET_CHILD_SUBREAPER), so while it lives, its descendants are exactly
the stack. If it was killed, four traces remain: recorded processes and sessions, an open file that children inherit,
a variable in their environment, and their parents. No single one survives `setproctitle`, `setsid` and `close_fds`;
together they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
ID_VARIABLE = "DROPFORGE_STACK_ID"


@dataclass(frozen=True)
class Process:
    """A process as the kernel shows it; `start` is in clock ticks since boot, so (pid, start) is never used twice."""

    pid: int
    start: int
    parent: int = 0
    session: int = 0
    zombie: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start


@dataclass(frozen=True)
class Traces:
    """What a supervisor wrote down so that its processes can be found without it."""

    boot: str
    stack_id: str
    mark: Path
    processes: frozenset[tuple[int, int]]


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of orphaned processes")


def boot_id() -> str:
    """Changes with every boot: process numbers of an earlier one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def look(pid: int) -> Process | None:
    """The process with this number, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may contain anything; fields follow the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0] in {b"Z", b"X"})


def table() -> dict[int, Process]:
    """Every process of the machine that this user may see."""
    found = (look(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(roots: Iterable[int], processes: dict[int, Process]) -> set[int]:
    """The numbers of all children of `roots`, and theirs; not the roots themselves."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def leftovers(traces: Traces) -> list[Process]:
    """The living processes of a stack whose supervisor is gone."""
    if traces.boot != boot_id():
        return []
    processes = {pid: process for pid, process in table().items() if not process.zombie}
    starts = dict(traces.processes)
    marks = _spellings(traces.mark)
    found = {pid for pid, start in starts.items() if pid in processes and processes[pid].start == start}
    for process in processes.values():
        leader = processes.get(process.session)
        recorded = starts.get(process.session)
        # A session outlives its leader; a living leader must be the recorded one.
        same_leader = leader is None or leader.start == recorded
        in_session = recorded is not None and process.start >= recorded and same_leader
        if in_session or _has_mark(process.pid, marks) or _has_variable(process.pid, traces.stack_id):
            found.add(process.pid)
    found |= descendants(found, processes)
    return [processes[pid] for pid in sorted(found - _self_and_ancestors(processes))]


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.start != process.start:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def alive(process: Process) -> bool:
    now = look(process.pid)
    return now is not None and now.start == process.start and not now.zombie


def end(processes: Iterable[Process], grace: float, asked: Mapping[int, signal.Signals] | None = None) -> None:
    """Ask processes to end, and kill those that have not after `grace` seconds.

    :param asked: by process number, the signal that asks it, where it is not SIGTERM.
    """
    asked = asked or {}
    left = [process for process in processes if send(process, asked.get(process.pid, signal.SIGTERM))]
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if alive(process)]
    for process in left:
        send(process, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(alive(process) for process in left) and time.monotonic() < deadline:
        time.sleep(0.02)


def end_all(find: Callable[[], list[Process]], grace: float) -> bool:
    """End what is found until nothing is, as what is killed may just have started more; False if there was nothing."""
    for number in range(20):
        if not (left := find()):
            return number > 0
        end(left, grace)
    return True


def reap() -> None:
    """Take the exits of all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def own_descendants() -> list[Process]:
    """What this process has started and what that has, as far as it lives."""
    found = table()
    return [found[pid] for pid in sorted(descendants([os.getpid()], found)) if not found[pid].zombie]


def ending(code: int) -> str:
    """How a process ended, for people. :param code: as of `os.waitstatus_to_exitcode`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"


def works_in(process: Process, folder: Path) -> bool:
    """Whether this folder is the process's current one."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cwd").readlink() == folder
    return False


def holds(process: Process, mark: Path) -> bool:
    """Whether a process has this file open."""
    return _has_mark(process.pid, _spellings(mark))


def _spellings(mark: Path) -> set[Path]:
    place = mark.parent.resolve() / mark.name  # a link in its place may lead to what all hold open
    return {place, place.with_name(f"{place.name} (deleted)")}  # as the kernel shows it once the folder was removed


def _has_mark(pid: int, marks: Set[Path]) -> bool:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if entry.readlink() in marks:
                    return True
    return False


def _has_variable(pid: int, stack_id: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"{ID_VARIABLE}={stack_id}".encode() in variables
    return False


def _self_and_ancestors(processes: dict[int, Process]) -> set[int]:
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        pid = processes[pid].parent if pid in processes else 0
    return found
