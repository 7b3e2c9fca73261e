"""Where the ranks of a measurement meet: all have to be there before the first collective, and who is not is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer.gang import Gang

_LEAST: Final = 1.0  # seconds that joining the group has at least
_LOOK: Final = 0.05


class AbsentError(Exception):
    """Some ranks did not come."""


def join(gang: Gang, end: float, came: Callable[[], object], joining: Callable[[], object]) -> None:
    """Meet all other ranks and form the process group with them.

    :param end: when it has to be done, by the monotonic clock. :param came: called when the first node has answered.
    :param joining: called when all are there.
    :raises AbsentError: naming the ranks that did not come.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=max(_LEAST, end - time.monotonic()))))
    came()
    _meet(PrefixStore("preflight-meeting", store), gang, end)
    joining()
    cuda = gang.device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("preflight", store),
        rank=gang.rank,
        world_size=gang.world,
        timeout=timedelta(seconds=max(_LEAST, end - time.monotonic())),
        device_id=gang.device if cuda else None,
    )


def _meet(store: Any, gang: Gang, end: float) -> None:
    store.set(f"here/{gang.rank}", "1")
    store.add("here", 1)
    while store.add("here", 0) < gang.world:
        if time.monotonic() > end:
            missing = [rank for rank in range(gang.world) if not store.check([f"here/{rank}"])]
            names = ", ".join(f"{rank} (node {rank // gang.local_world})" for rank in missing[:8])
            raise AbsentError(names + (" and others" if len(missing) > 8 else ""))
        time.sleep(_LOOK)
