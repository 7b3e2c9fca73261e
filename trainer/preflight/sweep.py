"""The ranks' part of `dropforge bench network`: every collective over a range of sizes, and the links between nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dropforge.network_bench import COLLECTIVES, LARGE, Figure, Measured, Order
from trainer.preflight.collectives import counted, links, timed
from trainer.preflight.meeting import AbsentError, join
from trainer.preflight.transport import carried, wrong
from trainer.preflight.verdict import PreflightError

if TYPE_CHECKING:
    from trainer.gang import Gang

_MEETING: Final = 300.0  # seconds that ranks wait for those whose torch is still being imported
_TRIES: Final = 5
_SMALL_TRIES: Final = 20
_LINK: Final = 16 << 20  # bytes
_GROWTH: Final = 4  # a size that is so much larger takes about so much longer


def sweep(order: Order, gang: Gang, log: Path, say: Callable[[Figure], object]) -> Measured:
    """Measure together with all other ranks; the same on each.

    :param log: NCCL's lines of this rank. :param say: told each figure once it is there.
    :raises PreflightError: if ranks do not come, or NCCL took another network than the order's.
    """
    import torch

    from trainer.peer_values import gather_values

    try:
        join(gang, time.monotonic() + _MEETING + order.seconds, lambda: None, lambda: None)
    except AbsentError as error:
        text = f"these ranks did not come: {error}. Look at the last lines of their pods"
        raise PreflightError("peers", text) from error
    figures = []
    for collective in COLLECTIVES:
        left, before = order.seconds / len(COLLECTIVES), 0.0
        for size in order.sizes:
            if size < LARGE and collective != "all_reduce":
                continue
            tries = _SMALL_TRIES if size < LARGE else _TRIES
            # The first large one always, however slow; the same on all ranks, as the times are.
            if size > LARGE and before * _GROWTH * (tries + 1) > left:
                break
            whole = counted(collective, size, gang.world)
            before = timed(gang, collective, whole, tries)
            left -= before * (tries + 1)
            figures.append(Figure(collective, whole, before))
            say(figures[-1])
    nodes, cuda = gang.world // gang.local_world, gang.device.type == "cuda"
    text = log.read_text(errors="replace") if log.exists() else ""
    if cuda and nodes > 1:
        other = wrong(order.fabric, text, Path("/dev/infiniband").exists())
        if other is not None:
            raise PreflightError(*other)
    hosts: list[str] = gather_values(_host(), device=gang.device)
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if cuda else {}  # type: ignore[no-untyped-call]
    return Measured(
        ranks=gang.world,
        nodes=nodes,
        transport=carried(text, cuda, nodes),
        gpu=gang.device_name if cuda else "",
        hosts=tuple(hosts[:: gang.local_world]),
        links=links(gang, _LINK) if nodes > 1 else {},
        versions={"torch": str(torch.__version__), **nccl},
        figures=tuple(figures),
    )


def _host() -> str:
    import os
    import socket

    return os.environ.get("POD_NAME") or socket.gethostname()
