"""Collectives and links, timed: the one way in which preflight and `dropforge bench network` measure.

Each operation is timed by itself, to its end on the device; nccl-tests starts twenty and divides, which makes
small ones look faster and large ones the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dropforge.network_bench import Collective

if TYPE_CHECKING:
    from trainer.gang import Gang


def timed(gang: Gang, collective: Collective, size: int, tries: int) -> float:
    """Seconds of the median, after one that is not counted; of the slowest rank, so the same on each.

    :param size: bytes as nccl-tests count them: of the whole tensor, gathered or not yet scattered.
    """
    import torch
    import torch.distributed as dist

    operation, seconds = _operation(gang, collective, size), []
    for _ in range(tries + 1):
        synchronise(gang)
        began = time.perf_counter()
        operation()
        synchronise(gang)
        seconds.append(time.perf_counter() - began)
    found = torch.tensor(sorted(seconds[1:])[tries // 2], dtype=torch.float64, device=gang.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def counted(collective: Collective, size: int, ranks: int) -> int:
    """The size as ranks can share it: of whole numbers of four bytes, as many for each."""
    each = 4 if collective == "all_reduce" else 4 * ranks
    return max(1, -(-size // each)) * each


def _operation(gang: Gang, collective: Collective, size: int) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    # Zeros: their sum stays finite, and a sum is what switches can do themselves.
    whole = torch.zeros(size // 4, dtype=torch.float32, device=gang.device)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole)
    part = torch.zeros(size // 4 // gang.world, dtype=torch.float32, device=gang.device)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    return lambda: dist.reduce_scatter_tensor(part, whole)


def synchronise(gang: Gang) -> None:
    if gang.device.type == "cuda":
        import torch

        torch.cuda.synchronize(gang.device)


def links(gang: Gang, size: int) -> dict[tuple[int, int], float]:
    """GB/s from each node to the next: their first ranks send to each other, one after another around the ring."""
    import torch
    import torch.distributed as dist

    nodes, mine = gang.world // gang.local_world, gang.rank // gang.local_world
    tensor = torch.ones(size // 4, dtype=torch.float32, device=gang.device)
    speeds = torch.zeros(nodes, dtype=torch.float64, device=gang.device)
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    for sender, receiver in ring:
        dist.barrier()
        if gang.rank % gang.local_world or mine not in (sender, receiver):
            continue
        for _ in range(2):  # the first one connects
            synchronise(gang)
            began = time.perf_counter()
            if mine == sender:
                dist.send(tensor, receiver * gang.local_world)
            else:
                dist.recv(tensor, sender * gang.local_world)
            synchronise(gang)
            seconds = time.perf_counter() - began
        if mine == receiver:
            speeds[sender] = size / seconds / 1e9
    dist.all_reduce(speeds)
    return {link: float(speeds[link[0]].item()) for link in ring}
