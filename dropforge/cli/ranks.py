"""The ranks of a gang, one line each: where each of them is, what it uses, and when it was last heard of. Pure.

What a rank's processes use is known on this machine alone; elsewhere the use of its node counts, which its launcher
tells MLflow every ten seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

_NODE: Final = re.compile(r"system/(?:node_(\d+)/)?(?!.*/)(\w+)")
_RANK_0: Final = ("train/", "eval/")


@dataclass(frozen=True)
class Point:
    """The newest value of a metric. :param at: Unix time at which it was measured, at that step."""

    value: float
    at: float
    step: int = 0


@dataclass(frozen=True)
class Pod:
    """A pod of the gang. :param node_rank: 0 for the one that leads."""

    name: str
    node_rank: int
    phase: str
    node: str = ""


@dataclass(frozen=True)
class Use:
    """What the processes of a rank use. :param cpu: percent of one core."""

    cpu: float | None
    memory: int


@dataclass(frozen=True)
class Rank:
    """
    :param cpu, memory, of: percent and bytes; of its processes, where 100 percent are one core, or of its whole node.
    :param gpu, gpu_memory: percent and bytes of its GPU. :param seen: Unix time of the last sign of life.
    """

    rank: int
    pod: str
    phase: str
    node: str
    of: Literal["process", "node"] = "node"
    cpu: float | None = None
    memory: int | None = None
    gpu: float | None = None
    gpu_memory: int | None = None
    seen: float | None = None

    def plain(self, now: float) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "rank": self.rank,
            "pod": self.pod or None,
            "phase": self.phase or None,
            "node": self.node or None,
            "of": self.of,
            "cpu_percent": self.cpu,
            "memory_bytes": self.memory,
            "gpu_percent": self.gpu,
            "gpu_memory_bytes": self.gpu_memory,
            "seen_seconds": None if self.seen is None else round(max(0.0, now - self.seen), 1),
        }


def ranks_of(
    pods: Sequence[Pod], each: int, metrics: Mapping[str, Point], used: Mapping[int, Use], since: float = 0.0
) -> list[Rank]:
    """All ranks in order.

    :param each: ranks in a pod. :param metrics: the newest values of the MLflow run, by name. :param used: by rank.
    :param since: Unix time at which the gang was made: what was measured before tells of another one.
    """
    nodes = _by_node({name: point for name, point in metrics.items() if point.at >= since})
    own = [point.at for name, point in metrics.items() if name.startswith(_RANK_0) and point.at >= since]
    found = []
    for pod in sorted(pods, key=lambda pod: pod.node_rank):
        told = nodes.get(pod.node_rank, {})
        for local in range(each):
            rank = pod.node_rank * each + local
            signs = [point.at for point in told.values()] + (own if rank == 0 else [])
            use = used.get(rank)
            megabytes = _value(told, "system_memory_usage_megabytes")
            card = _value(told, f"gpu_{local}_memory_usage_megabytes")
            found.append(
                Rank(
                    rank,
                    pod.name,
                    pod.phase,
                    pod.node,
                    "process" if use else "node",
                    use.cpu if use else _value(told, "cpu_utilization_percentage"),
                    use.memory if use else None if megabytes is None else round(megabytes * 1e6),
                    _value(told, f"gpu_{local}_utilization_percentage"),
                    None if card is None else round(card * 1e6),
                    max(signs, default=None),
                )
            )
    return found


def use(
    before: Mapping[int, tuple[float, int]], after: Mapping[int, tuple[float, int]], seconds: float
) -> dict[int, Use]:
    """What ranks used between two looks."""
    found = {}
    for rank, (spent, memory) in after.items():
        known = rank in before and seconds > 0
        # A process of the rank that has ended in between takes its seconds with it.
        cpu = max(0.0, 100 * (spent - before[rank][0]) / seconds) if known else None
        found[rank] = Use(None if cpu is None else round(cpu, 1), memory)
    return found


def _by_node(metrics: Mapping[str, Point]) -> dict[int, dict[str, Point]]:
    """The `system/` metrics of each node; a gang of one node gives it no name."""
    found: dict[int, dict[str, Point]] = {}
    for name, point in metrics.items():
        if match := _NODE.fullmatch(name):
            found.setdefault(int(match[1] or 0), {})[match[2]] = point
    return found


def _value(metrics: Mapping[str, Point], name: str) -> float | None:
    point = metrics.get(name)
    return point.value if point is not None and math.isfinite(point.value) else None
