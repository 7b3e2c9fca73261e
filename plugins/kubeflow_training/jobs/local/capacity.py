"""What a gang asks for, what the machine has, and what is missing: pure arithmetic."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.elastic import node_range
from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.local.devices import devices
from kubeflow_training.jobs.manifest.checks.pod import quantity
from kubeflow_training.jobs.manifest.words import CONTAINER

CPUS_VARIABLE: Final = "KUBEFLOW_TRAINING_CPUS"
MEMORY_VARIABLE: Final = "KUBEFLOW_TRAINING_MEMORY_GB"
_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NEVER_FITS_MEND: Final = "Ask for less, or raise KUBEFLOW_TRAINING_CPUS, _MEMORY_GB or _GPUS if the machine has more"


@dataclass(frozen=True)
class Resources:
    """
    :param memory: bytes.
    """

    cpus: float = 0.0
    memory: float = 0.0
    gpus: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cpus + other.cpus, self.memory + other.memory, self.gpus + other.gpus)

    def __sub__(self, other: Resources) -> Resources:
        return Resources(self.cpus - other.cpus, self.memory - other.memory, self.gpus - other.gpus)

    def missing(self, free: Resources) -> str:
        """What `free` lacks for this, as words ("2 cpus and 1.5 GB of memory"); empty if it is enough."""
        lacks = []
        # A thousandth of tolerance, because requests are added and subtracted as floats.
        if (cpus := self.cpus - free.cpus) > 1e-3:
            lacks.append(_number(cpus, "cpu"))
        if (memory := self.memory - free.memory) > 1e5:
            lacks.append(f"{memory / 1e9:.3g} GB of memory")
        if (gpus := self.gpus - free.gpus) > 0:
            lacks.append(_number(gpus, "gpu"))
        return " and ".join([", ".join(lacks[:-1]), lacks[-1]] if len(lacks) > 1 else lacks)

    def __str__(self) -> str:
        gpus = f", {_number(self.gpus, 'gpu')}" if self.gpus else ""
        return f"{_number(self.cpus, 'cpu')}, {self.memory / 1e9:.3g} GB of memory{gpus}"


def pod_resources(template: Mapping[str, Any]) -> Resources:
    """What one pod asks for: its requests, else its limits.

    :raises ValueError: if a quantity is none.
    """
    container = next(item for item in template["spec"]["containers"] if item.get("name") == CONTAINER)
    return _resources(container.get("resources") or {})


def job_resources(job: Mapping[str, Any]) -> Resources:
    """What all pods of a job of any kind ask for together.

    :raises ValueError: if a quantity is none.
    """
    total = Resources()
    for pods, asked in kind_seen(job).requests(job):
        each = _resources(asked)
        total += Resources(pods * each.cpus, pods * each.memory, pods * each.gpus)
    return total


def _resources(resources: Mapping[str, Any]) -> Resources:
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    gpus = sum(int(quantity(value)) for key, value in asked.items() if key.endswith("/gpu"))
    return Resources(quantity(asked.get("cpu", 0)), quantity(asked.get("memory", 0)), gpus)


def gang_resources(manifest: Mapping[str, Any], pods: int | None = None) -> Resources:
    """What the gang asks for.

    :param pods: how many of its pods, the first ones; all of them unless given.
    """
    total, left = Resources(), pods
    for kind in ("Master", "Worker"):
        replica = manifest["spec"]["pytorchReplicaSpecs"].get(kind)
        count = replica.get("replicas", 1) if replica else 0
        count = count if left is None else min(count, left)
        for _ in range(count):
            total += pod_resources(replica["template"])
        left = None if left is None else left - count
    return total


def size_that_fits(manifest: Mapping[str, Any], free: Resources) -> int:
    """How many pods of the gang can start now: all of a rigid one, what fits of an elastic one, 0 if too few fit."""
    least, most = node_range(manifest)
    return next((n for n in range(most, least - 1, -1) if not gang_resources(manifest, n).missing(free)), 0)


def never_fits(wants: Resources, total: Resources) -> str:
    """Why a gang that wants this much can never start; empty if it can."""
    short = wants.missing(total)
    return short and f"the job asks for {wants}, and this machine offers {total}: {short} too few"


def machine(env: Mapping[str, str] = os.environ, limits: tuple[Path, ...] = _LIMITS) -> Resources:
    """What this machine or container has, or what the environment says that jobs may use.

    :param limits: files of the container's memory limit.

    :raises ValueError: if a variable is no number.
    """
    memory = next(
        float(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # not there, or `max`
            memory = min(memory, float(int(path.read_text())))
    return Resources(
        float(env.get(CPUS_VARIABLE) or os.cpu_count() or 1),
        float(env[MEMORY_VARIABLE]) * 1e9 if env.get(MEMORY_VARIABLE) else memory,
        len(devices(env)),
    )


def _number(count: float, noun: str) -> str:
    return f"{count:.3g} {noun}" + ("" if count == 1 else "s")
