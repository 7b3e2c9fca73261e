"""What a measured network is held to: published figures of its instance, and what was kept of such nodes."""

from __future__ import annotations

import csv
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dropforge import layout
from dropforge.errors import DropforgeError
from dropforge.network_bench import COLLECTIVES, Collective, Measured
from dropforge.placement.fabrics import Network
from dropforge.store import ChangedObjectError, MissingObjectError, Store

_PUBLISHED: Final = Path(__file__).parent / "placement" / "bandwidths.csv"
_SLOW_TO_ANSWER: Final = 2.0  # times the kept latency; what is less depends on what else the cores do
_HALF: Final = 0.5


@dataclass(frozen=True)
class Shape:
    """What makes two measurements comparable. :param host: of the one machine on which all ranks were, else "".

    :param instance: "" if the recipe names none.
    """

    instance: str
    fabric: str
    nodes: int
    processes_per_node: int
    gpus: int
    host: str = ""

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return layout.network_key(hashlib.sha256(text.encode()).hexdigest()[:32])


@dataclass(frozen=True)
class Baseline:
    """:param source: where it is from, for people. :param speeds: GB/s on the bus by size.

    :param before: the whole measurement, if it was kept.
    """

    source: str
    speeds: Mapping[Collective, Mapping[int, float]]
    before: Measured | None = None


@dataclass(frozen=True)
class Compared:
    """One figure beside what it is held to. :param share: of what was expected; above 1 is better."""

    what: str
    source: str
    measured: float
    expected: float
    unit: str
    share: float
    slow: bool

    def __str__(self) -> str:
        told = f"{self.what}: {self.measured:.3g} {self.unit}, and {self.expected:.3g} {self.source}"
        off = 100 * abs(1 - self.share)
        return f"{told}: {off:.0f}% {'below' if self.share < 1 else 'above'}" if self.slow or off >= 1 else told


def published(instance: str, nodes: int, gpus: int, of: int) -> Baseline | None:
    """None where nobody has published such nodes' figures. :param gpus: of a pod. :param of: GPUs of the instance."""
    if not gpus or gpus != of:
        return None
    speeds: dict[Collective, dict[int, float]] = {}
    source = ""
    with _PUBLISHED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["instance"], int(row["nodes"])) == (instance, nodes):
                name = next(one for one in COLLECTIVES if one == row["collective"])
                speeds.setdefault(name, {})[int(row["bytes"])] = float(row["bus_gb_per_second"])
                source = row["source"]
    return Baseline(f"published ({source})", speeds) if speeds else None


@dataclass(frozen=True)
class Kept:
    """The measurement of this shape that was kept. :param etag: "" if there is none."""

    baseline: Baseline | None = None
    etag: str = ""


def read_kept(store: Store, shape: Shape) -> Kept:
    """What is kept now. :raises DropforgeError: if it is none of ours."""
    found = store.stat(shape.key)
    if found is None:
        return Kept()
    try:
        with store.open(shape.key, found.etag) as stream:
            values = json.loads(stream.read())
        before, taken = Measured.of(values["measured"]), str(values["taken"])
    except (MissingObjectError, ChangedObjectError):  # replaced just now
        return read_kept(store, shape)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        mend = "Remove it, and keep a new measurement with --keep"
        raise DropforgeError(f"{store.uri}/{shape.key}", f"it is no measurement ({error})", mend) from error
    speeds = {name: before.speeds(name) for name in COLLECTIVES}
    return Kept(Baseline(f"kept on {taken[:10]}", speeds, before), found.etag)


def keep(store: Store, shape: Shape, measured: Measured, taken: str, before: Kept) -> None:
    """Hold later measurements to this one. :param before: what was there when the measurement began.

    :raises DropforgeError: if somebody else has kept one meanwhile: theirs stays.
    """
    body = json.dumps({"taken": taken, "shape": asdict(shape), "measured": measured.plain()}, indent=1).encode()
    key, etag = shape.key, before.etag
    written = store.put_if_match(key, body, etag) if etag else store.put_if_absent(key, body)
    if not written:
        mend = "Give the command again: it is then held to theirs"
        raise DropforgeError(f"{store.uri}/{key}", "another process has kept a measurement meanwhile", mend)


def compare(measured: Measured, against: Baseline, tolerance: float) -> list[Compared]:
    """Each collective by the median over the sizes that both have, and the latency where it is known.

    :param tolerance: the share below what is expected that is borne.
    """
    found = []
    for name in COLLECTIVES:
        mine, theirs = measured.speeds(name), against.speeds.get(name) or {}
        sizes = sorted(set(mine) & set(theirs))
        if not sizes:
            continue
        share = statistics.median(mine[size] / theirs[size] for size in sizes)
        best = max(sizes, key=lambda size: theirs[size])
        slow = share < 1 - tolerance
        # The figures shown are of one size, and their share is that of all.
        found.append(Compared(name, against.source, mine[best], theirs[best], "GB/s", share, slow))
    if against.before is not None:
        mine_ms, theirs_ms = 1e3 * measured.latency, 1e3 * against.before.latency
        slow = mine_ms > _SLOW_TO_ANSWER * theirs_ms
        found.append(Compared("latency", against.source, mine_ms, theirs_ms, "ms", theirs_ms / mine_ms, slow))
    return found


def causes(
    measured: Measured, compared: Sequence[Compared], before: Measured | None, network: Network, guilty: int | None
) -> list[str]:
    """What may have made it slow, the likeliest first, each with its mend; nothing if nothing is. Pure.

    :param guilty: the node whose links alone are slow.
    """
    if not any(one.slow for one in compared):
        return []
    found = []
    if before is not None and before.transport != measured.transport:
        found.append(
            f"it went over {measured.transport}, and over {before.transport} before: see that image and devices are "
            "the same, by `python -m trainer doctor` in a pod"
        )
    if before is not None and (changed := _changed(before.versions, measured.versions)):
        found.append(f"versions differ ({changed}): if the new ones are what you want, --keep what they reach")
    if guilty is not None:
        name = measured.hosts[guilty] if guilty < len(measured.hosts) else ""
        found.append(f"node {guilty} ({name}) is slow to all others: look at its adapters and cables, and drain it")
    if not network.gpus:
        found.append("the cores were busy, as gloo's ranks compute with them: measure again, alone on the nodes")
    elif not any(one.slow for one in compared if one.unit == "GB/s"):
        found.append("only small messages are slow: cores that others use, or `compute.cpus` below the ranks' number")
    elif measured.nodes == 1 or (before is not None and _links_hold(measured, before)):
        found.append("the links within the nodes: look at NVLink and PCIe by `python -m trainer doctor` in a pod")
    else:
        if network.fabric == "tcp":
            found.append("`compute.fabric` is tcp: where the nodes have EFA or InfiniBand, let pods ask for it")
        found.append("nodes far apart: a placement group or one zone (`compute.node_selector`) brings them together")
        found.append("others use the same network now: measure again at another hour before anything is changed")
    return found


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = sorted(set(before) | set(now))
    return ", ".join(
        f"{name} {before.get(name, 'none')} before, {now.get(name, 'none')} now"
        for name in names
        if before.get(name) != now.get(name)
    )


def _links_hold(measured: Measured, before: Measured) -> bool:
    """Whether nodes still reach each other as fast as they did."""
    both = set(measured.links) & set(before.links)
    return bool(both) and all(measured.links[link] > _HALF * before.links[link] for link in both)


def plain(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """As JSON has it."""
    return [asdict(one) for one in compared]
