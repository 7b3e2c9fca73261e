"""Processes as /proc tells them; a process is known by its id and its start time together, since ids are used again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def identity(pid: int) -> dict[str, Any]:
    """What tells this process from every other one, before and after: plain values for a file."""
    return {"pid": pid, "start": start_time(pid), "boot": _boot()}


def alive(known: Mapping[str, Any] | None) -> bool:
    """Whether the process of that identity still runs."""
    if not known or known.get("boot") != _boot() or not isinstance(known.get("pid"), int):
        return False
    return start_time(known["pid"]) == known.get("start") is not None


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def children(pid: int) -> list[int]:
    """The process's children, zombies too."""
    found = []
    for other in _pids():
        fields = _stat(other)
        if fields is not None and int(fields[1]) == pid:
            found.append(other)
    return found


def kill_marked(mark: str, session: int | None) -> int:
    """SIGKILL every process of the session, and every one whose environment holds `mark`; how many were found.

    For the rare case that a pod's keeper was killed itself. Processes that renamed themselves may have lost the mark.
    """
    found = 0
    for pid in _pids():
        if pid == os.getpid():
            continue
        fields = _stat(pid)
        if fields is None or fields[0] in (b"Z", b"X"):
            continue
        environment = b""
        with contextlib.suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes()
        if (session is not None and int(fields[3]) == session) or mark.encode() in environment.split(b"\0"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                found += 1
    return found


def oom_kills() -> int:
    """How many processes the kernel has killed for memory so far, in our control group or else on this machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = next(
            line.split("::", 1)[1]
            for line in (_PROC / "self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        return _counter(Path("/sys/fs/cgroup" + group.rstrip("/")) / "memory.events")
    with contextlib.suppress(OSError, ValueError):
        return _counter(_PROC / "vmstat")
    return 0


def _counter(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    raise ValueError(path)


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat after the name: state, parent, group, session, ..., start time (19)."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
