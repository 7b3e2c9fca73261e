"""What this machine gives the process; no torch needed."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use: its affinity, cut to the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as stream:  # noqa: PTH123 - a kernel file
            quota, period = stream.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores
