"""What a node uses of its processors, memory, disk, network and GPUs, by the names that MLflow's page of them expects.

Counters are read from `/proc` and `/sys`, GPUs by NVML: about half a millisecond in all, without torch or psutil.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from trainer.node.nvml import Nvml

_WORD: Final = 4  # bytes that one count of an InfiniBand port stands for


class Gpus(Protocol):
    """Whatever tells of GPUs."""

    def sample(self) -> dict[str, float]: ...


class Machine:
    """Samples of the machine; network and processors since the sample before, or since the start.

    :param root: where `proc` and `sys` are. :param disk: a path on the disk to look at.
    """

    def __init__(self, root: Path = Path("/"), disk: Path = Path("/"), gpus: Gpus | None = None) -> None:
        self._root, self._disk, self._gpus = root, disk, gpus
        self._cpu = self._read_cpu()
        self._network = self._read_network()

    def sample(self) -> dict[str, float]:
        """Values of now; what this machine does not tell is left out."""
        found: dict[str, float] = {}
        for part in (self._cpu_use, self._memory, self._disk_use, self._network_use, self._gpu_use):
            with suppress(OSError, ValueError, IndexError, KeyError):  # a sandbox may hide it, a GPU may be lost
                found |= part()
        return {key: round(value, 3) for key, value in found.items()}

    def _cpu_use(self) -> dict[str, float]:
        before, self._cpu = self._cpu, self._read_cpu()
        if before is None or self._cpu is None:
            return {}
        idle, total = (now - then for now, then in zip(self._cpu, before, strict=True))
        return {"cpu_utilization_percentage": 100 * (1 - idle / total)} if total > 0 else {}

    def _memory(self) -> dict[str, float]:
        lines = self._text("proc/meminfo").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        total, used = values["MemTotal"], values["MemTotal"] - values["MemAvailable"]
        return {
            "system_memory_usage_megabytes": used / 1e6,
            "system_memory_usage_percentage": 100 * used / total,
        }

    def _disk_use(self) -> dict[str, float]:
        stat = os.statvfs(self._disk)
        used, free = (stat.f_blocks - stat.f_bfree) * stat.f_frsize, stat.f_bavail * stat.f_frsize
        return {
            "disk_usage_megabytes": used / 1e6,
            "disk_available_megabytes": free / 1e6,
            "disk_usage_percentage": 100 * used / (used + free),
        }

    def _network_use(self) -> dict[str, float]:
        return {key: (value - self._network.get(key, value)) / 1e6 for key, value in self._read_network().items()}

    def _gpu_use(self) -> dict[str, float]:
        return self._gpus.sample() if self._gpus is not None else {}

    def _read_cpu(self) -> tuple[int, int] | None:
        """Ticks that the processors did nothing, and all ticks."""
        try:
            ticks = [int(value) for value in self._text("proc/stat").splitlines()[0].split()[1:9]]
            return ticks[3] + ticks[4], sum(ticks)  # waiting for a disk is doing nothing
        except (OSError, ValueError, IndexError):
            return None

    def _read_network(self) -> dict[str, int]:
        """Bytes in and out so far, by Ethernet and by InfiniBand, which is not in `net/dev`."""
        found: dict[str, int] = {}

        def add(kind: str, received: int, sent: int) -> None:
            for way, count in (("receive", received), ("transmit", sent)):
                key = f"{kind}_{way}_megabytes"
                found[key] = found.get(key, 0) + count

        with suppress(OSError, ValueError, IndexError):
            for line in self._text("proc/net/dev").splitlines()[2:]:
                name, _, counts = line.partition(":")
                if name.strip() != "lo":
                    add("network", int(counts.split()[0]), int(counts.split()[8]))
        for port in (self._root / "sys/class/infiniband").glob("*/ports/*/counters"):
            with suppress(OSError, ValueError):
                sent = int((port / "port_xmit_data").read_text())
                add("infiniband", _WORD * int((port / "port_rcv_data").read_text()), _WORD * sent)
        return found

    def _text(self, path: str) -> str:
        return (self._root / path).read_text()


def find_gpus() -> Gpus | None:
    """The machine's GPUs; None without any, or without a driver."""
    try:
        return Nvml()
    except (OSError, AttributeError):  # another library of that name
        return None
