"""What this machine gives the process; no torch needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second one since torch 2.9


def available_cores(group: Path = _CONTROL_GROUP) -> int:
    """Cores that this process may use: its affinity, cut to the control group's quota.

    :param group: where the kernel shows the process's own control group, of version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(group)
    return cores if quota is None else min(cores, max(1, int(quota)))


def _quota(group: Path) -> float | None:
    """Cores' worth of time; None without a limit."""
    try:
        if (group / "cpu.max").exists():
            most, period = (group / "cpu.max").read_text().split()
        else:
            most, period = ((group / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(most) / int(period) if most.strip() not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def allocator(env: Mapping[str, str]) -> dict[str, str]:
    """What a process that uses GPUs needs in its environment, so that blocks of other sizes come from one piece of
    memory: rows of many lengths leave gaps else. Nothing where the user has set it himself.
    """
    return {} if any(name in env for name in _ALLOCATOR) else {_ALLOCATOR[0]: "expandable_segments:True"}
