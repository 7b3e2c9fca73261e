"""The processes of a pod of the local cluster, and what each of them uses, as /proc tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubeflow_training.jobs.local.environment import POD_MARK

_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """
    :param rank: global rank that it works for; None for those that start ranks, or have nothing to do with them.
    :param env: what it was started with.
    :param cpu_seconds: that it has used so far. :param memory: bytes that it holds now, shared ones too.
    """

    pid: int
    rank: int | None
    env: Mapping[str, str]
    cpu_seconds: float
    memory: int


def processes_of(pod_uid: str, proc: Path = _PROC) -> list[Process]:
    """All processes of a pod that this user may look at, the oldest first."""
    mark = f"{POD_MARK}={pod_uid}".encode()
    found = [process for pid in _pids(proc) if (process := _look(proc / str(pid), pid, mark)) is not None]
    return [process for _, process in sorted(found, key=lambda item: item[0])]


def _look(folder: Path, pid: int, mark: bytes) -> tuple[int, Process] | None:
    """When it began, and what it uses; None if it is another's, or has ended."""
    try:
        words = (folder / "environ").read_bytes().split(b"\0")
        if mark not in words:
            return None
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        memory = int((folder / "statm").read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None
    env = dict(word.decode(errors="surrogateescape").partition("=")[::2] for word in words if b"=" in word)
    # A pod's own RANK is that of its node; only processes of the elastic agent have a local rank.
    rank = env.get("RANK", "") if "LOCAL_RANK" in env else ""
    seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    return int(fields[19]), Process(pid, int(rank) if rank.isdecimal() else None, env, seconds, memory)


def _pids(proc: Path) -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir(proc) if entry.name.isdecimal())
