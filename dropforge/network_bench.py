"""What `dropforge bench network` asks of its ranks, and what they measure. Pure, and of the standard library alone.

Sizes and bandwidths are those of nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: Final[tuple[Collective, ...]] = ("all_reduce", "all_gather", "reduce_scatter")
MARK: Final = "@network "
"""How a line of the first rank begins that holds a `Figure` or, last of all, a `Measured`."""
LARGE: Final = 1 << 20
"""Bytes from which on a collective's time says how much the network carries; below, how long it takes to answer."""
SMALLEST: Final = 8
_MOST_BYTES: Final = 1 << 50
_SHORTEST, _LONGEST = 1e-9, 1e9  # seconds; what is between has a finite bandwidth
_HALF: Final = 0.5


@dataclass(frozen=True)
class Order:
    """What the ranks are to measure.

    :param gpus: of a pod. :param fabric: as `placement.fabrics.Network.name`.
    :param sizes: bytes, the smallest first. :param seconds: about how long all of it may take.
    :param joining: seconds that a node waits for the others.
    """

    gpus: int
    fabric: str
    sizes: tuple[int, ...]
    seconds: float
    joining: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """:raises ValueError: if the text is none."""
        try:
            values = json.loads(text)
            sizes = tuple(int(size) for size in values["sizes"])
            seconds, joining = float(values["seconds"]), float(values["joining"])
            return cls(int(values["gpus"]), str(values["fabric"]), sizes, seconds, joining)
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"it is no order of a measurement ({error!r})") from error


@dataclass(frozen=True)
class Figure:
    """One collective at one size. :param seconds: the median, of the slowest rank."""

    collective: Collective
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """All that the ranks found together.

    :param transport: what carried it between nodes: `gloo`, or as NCCL calls it. :param gpu: its model; "" without one.
    :param hosts: of the nodes, in their order. :param links: GB/s from the first rank of a node to that of the next.
    :param versions: of torch and NCCL.
    """

    ranks: int
    nodes: int
    transport: str
    gpu: str = ""
    hosts: tuple[str, ...] = ()
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()

    @property
    def latency(self) -> float:
        """Seconds of the smallest all-reduce."""
        return min((one.bytes, one.seconds) for one in self.figures if one.collective == "all_reduce")[1]

    def speeds(self, collective: Collective) -> dict[int, float]:
        """GB/s on the bus by size, of sizes that say something of it."""
        return {
            one.bytes: bus(one, self.ranks)
            for one in self.figures
            if one.collective == collective and one.bytes >= LARGE
        }

    def plain(self) -> dict[str, Any]:
        """As JSON has it; the figures with their bandwidths, which follow from the rest."""
        figures = [
            {**asdict(one), "alg_gb_per_second": algorithm(one), "bus_gb_per_second": bus(one, self.ranks)}
            for one in self.figures
        ]
        links = [{"from": a, "to": b, "gb_per_second": speed} for (a, b), speed in self.links.items()]
        return {**asdict(self), "links": links, "figures": figures}

    @classmethod
    def of(cls, values: Mapping[str, Any], figures: Sequence[Figure] = ()) -> Measured:
        """The inverse of `plain`. :param figures: in the place of its own. :raises ValueError: if it is none."""
        try:
            found = cls(
                ranks=int(values["ranks"]),
                nodes=int(values["nodes"]),
                transport=str(values["transport"]),
                gpu=str(values["gpu"]),
                hosts=tuple(map(str, values["hosts"])),
                links={(int(one["from"]), int(one["to"])): float(one["gb_per_second"]) for one in values["links"]},
                versions={str(key): str(value) for key, value in values["versions"].items()},
                figures=tuple(figures) or tuple(figure(one) for one in values["figures"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it is no measurement ({error!r})") from error
        places = range(found.nodes)
        if not 1 <= found.nodes <= found.ranks or found.ranks < 2 or len(found.hosts) != found.nodes:
            raise ValueError("its ranks, nodes and hosts do not fit together")
        if any(place not in places for link in found.links for place in link):
            raise ValueError("it has links of nodes that are none")
        if not all(0 < speed < math.inf for speed in found.links.values()):
            raise ValueError("it has links whose speed is none")
        if not any(one.collective == "all_reduce" for one in found.figures):
            raise ValueError("it has no all_reduce")
        return found


def figure(values: Mapping[str, Any]) -> Figure:
    """From JSON's values. :raises ValueError: if they are none."""
    name = next((one for one in COLLECTIVES if one == values.get("collective")), None)
    if name is None:
        raise ValueError(f"there is no collective {values.get('collective')!r}")
    try:
        found = Figure(name, int(values["bytes"]), float(values["seconds"]))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is no figure ({error!r})") from error
    if not (0 < found.bytes <= _MOST_BYTES and _SHORTEST <= found.seconds <= _LONGEST):
        raise ValueError(f"{found.bytes} bytes in {found.seconds} s are no figure")
    return found


def sizes(largest: int) -> tuple[int, ...]:
    """From the smallest to the largest, each four times the one before."""
    found, size = [SMALLEST], 4 << 10
    while size <= largest:
        found.append(size)
        size *= 4
    return tuple(found)


def algorithm(of: Figure) -> float:
    """GB/s as the program sees them."""
    return of.bytes / of.seconds / 1e9


def bus(of: Figure, ranks: int) -> float:
    """GB/s that each link carries, whatever the number of ranks."""
    share = (ranks - 1) / ranks
    return algorithm(of) * (2 * share if of.collective == "all_reduce" else share)


def culprit(links: Mapping[tuple[int, int], float]) -> int | None:
    """The node whose every link is slow where the others' are not; None if the links do not say.

    :param links: gigabytes a second from node to node, in a ring.
    """
    nodes = {node for link in links for node in link}
    found = []
    for node in sorted(nodes):
        own = [speed for link, speed in links.items() if node in link]
        others = [speed for link, speed in links.items() if node not in link]
        if others and max(own) < _HALF * statistics.median(others):
            found.append(node)
    return found[0] if len(found) == 1 else None
