"""What the figures of a preflight mean: pure functions, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dropforge.placement.fabrics import Preflight
from dropforge.run import ExitCode

Kind = Literal["node", "peers", "recipe"]
CODES: Final[Mapping[str, ExitCode]] = {
    "node": ExitCode.NODE,  # this node is the cause: the next attempt rather takes another one
    "peers": ExitCode.HARDWARE,  # nodes or network, and not known which
    "recipe": ExitCode.BAD_RECIPE,  # another attempt would end the same
}


class PreflightError(Exception):
    """The run cannot begin here. :param kind: whose fault it is, as `CODES` has it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.code = CODES[kind]


@dataclass(frozen=True)
class Figures:
    """What all ranks measured together: the same on each, but for the time that it took.

    :param gb_per_second: bus bandwidth of a large all-reduce: how fast the slowest link was. :param milliseconds: of a
        small one. :param transport: what carried it: `gloo`, or as NCCL calls it.
    """

    ranks: int
    nodes: int
    gb_per_second: float
    milliseconds: float
    seconds: float
    transport: str

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks on {self.nodes} node(s) over {self.transport}: {self.gb_per_second:.3g} GB/s, "
            f"{self.milliseconds:.2g} ms, after {self.seconds:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """By their names in MLflow."""
        return {
            "preflight/bus_gb_per_second": self.gb_per_second,
            "preflight/latency_ms": self.milliseconds,
            "preflight/seconds": self.seconds,
        }


def too_slow(held: Preflight, gb_per_second: float, milliseconds: float) -> str | None:
    """What is below the floor, as a sentence; None if nothing is."""
    if held.gb_per_second and gb_per_second < held.gb_per_second:
        return f"an all-reduce reached {gb_per_second:.3g} GB/s, and {held.gb_per_second:g} is the floor"
    if held.milliseconds and milliseconds > held.milliseconds:
        return f"a small all-reduce took {milliseconds:.3g} ms, and {held.milliseconds:g} is the most"
    return None


def told(links: Mapping[tuple[int, int], float]) -> str:
    """The slowest links, for a message."""
    slowest = sorted(links.items(), key=lambda item: item[1])[:4]
    return ", ".join(f"node {a} to {b} {speed:.3g} GB/s" for (a, b), speed in slowest)


def of_child(result: Mapping[str, Any], held: Preflight) -> Figures:
    """The figures that the measuring process has left.

    :raises PreflightError: if it left a failure.
    """
    if "failure" in result:
        raise PreflightError(result["kind"], f"preflight, {held.fabric}: {result['failure']}")
    return Figures(**result["figures"])
