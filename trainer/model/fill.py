"""The shards of a hollow model (`trainer.model.hollow`): read by each rank from the files, and held against them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.model.build import Built


def fill_shards(built: Built, mesh: Any) -> None:
    """Read this rank's shard of each weight that is still empty.

    :param built: sharded. :param mesh: its last dimension is that of the shards.
    """
    assert built.slices is not None
    names = {id(weight): name for name, weight in built.model.named_parameters()}
    filled: dict[int, nn.Parameter] = {}
    for module in built.model.modules():
        for key, weight in module._parameters.items():
            if not isinstance(weight, DTensor) or not weight.to_local().is_meta:
                continue
            if id(weight) not in filled:
                rows = built.slices.read(names[id(weight)], *_rows(weight, mesh))
                shard = DTensor.from_local(
                    rows.to(mesh.device_type),
                    mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
                filled[id(weight)] = nn.Parameter(shard, weight.requires_grad)
            module._parameters[key] = filled[id(weight)]


def sums_of_shard(built: Built, mesh: Any) -> dict[str, int]:
    """`sum_of` the rows of this rank: over the ranks that hold a copy they make that of the files, modulo 2**64."""
    assert built.slices is not None
    weights: dict[str, Any] = dict(built.model.named_parameters())
    return {
        name: sum_of(weights[name].to_local().detach(), _rows(weights[name], mesh)[0]) for name in built.slices.names
    }


def sum_of(rows: torch.Tensor, first: int) -> int:
    """A sum over the bits of rows, each times its number in the weight. :param first: the number of the first one."""
    bits = rows.contiguous().view(torch.int32).reshape(len(rows), math.prod(rows.shape[1:])).sum(1, dtype=torch.int64)
    return int((bits * torch.arange(first + 1, first + 1 + len(rows), device=rows.device)).sum())


def _rows(weight: Any, mesh: Any) -> tuple[int, int]:
    """The rows of a weight that this rank holds: shards are slices of the first dimension, rounded up."""
    count, last = weight.shape[0], mesh.ndim - 1
    each = -(-count // mesh.size(last))
    start = min(mesh.get_local_rank(last) * each, count)
    return start, min(start + each, count)
