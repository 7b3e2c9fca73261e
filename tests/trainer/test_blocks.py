"""The files of the ranks: together they hold each element once, and any reader of safetensors understands them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.state.blocks import Block, Staging, join, own_blocks, read_blocks, whole

STATE = {
    "long": torch.arange(1000, dtype=torch.float32).view(10, 100),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "odd": torch.arange(3, dtype=torch.uint8),
    "flag": torch.tensor([True, False]),
    "step": torch.tensor(4.0),
    "none": torch.empty(0, 4),
    "wide": torch.arange(5, dtype=torch.float64),
}


SMALL = {"half", "odd", "flag", "step", "none"}  # each rank writes them


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("world", [1, 2, 5, 9])
def test_each_tensor_is_in_one_file_and_all_come_back(world: int) -> None:
    files = [bytes(Staging().fill(own_blocks(STATE, rank, world))) for rank in range(world)]
    assert same(join(map(read_blocks, files)), STATE)
    names = [name for data in files for name in load(data)]
    assert sorted(name for name in names if name not in SMALL) == sorted(STATE.keys() - SMALL)
    assert all(names.count(name) == world for name in SMALL)


def test_ranks_share_what_all_of_them_hold() -> None:
    state = {f"w{index}": torch.ones(100) for index in range(8)}
    sizes = [sum(block.values.nbytes for block in own_blocks(state, rank, 4).values()) for rank in range(4)]
    assert sizes == [800] * 4


def test_the_buffer_is_used_again_and_follows_a_new_layout() -> None:
    staging = Staging()
    first = staging.fill({"a": whole(torch.zeros(50))})
    address = torch.frombuffer(first, dtype=torch.uint8).data_ptr()
    second = staging.fill({"a": whole(torch.ones(50))})
    assert torch.frombuffer(second, dtype=torch.uint8).data_ptr() == address
    assert torch.equal(load(bytes(second))["a"], torch.ones(50))
    third = staging.fill({"a": whole(torch.ones(50)), "b": whole(torch.ones(2, dtype=torch.float64))})
    assert set(load(bytes(third))) == {"a", "b"}


def test_a_gap_is_told() -> None:
    part = Block(torch.zeros(2, 3), (4, 3), (2, 0))
    with pytest.raises(ValueError, match="not all blocks are there of w"):
        join([{"w": part}])


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 40])
def test_what_is_no_file_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match="no file of a state"):
        read_blocks(data)


def as_rank(
    full: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[object, ...]
) -> Iterator[tuple[int, int, DTensor]]:
    """Each rank of a mesh in turn, in this process: its number, how many there are, and its shard of a tensor."""
    world = math.prod(mesh_shape)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            local = full
            for dimension, place in enumerate(placements):
                if isinstance(place, Shard):
                    parts = local.chunk(mesh_shape[dimension], place.dim)
                    at = mesh.get_coordinate()[dimension]  # type: ignore[index]
                    local = parts[at] if at < len(parts) else local.narrow(place.dim, 0, 0)
            own = local.clone()
            yield (
                rank,
                world,
                DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()),
            )
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "placements", "writers"),
    [
        ((2,), (Shard(0),), 2),
        ((4,), (Shard(0),), 3),  # five rows over four ranks: two, two, one and none
        ((2,), (Replicate(),), 1),
        ((2, 2), (Replicate(), Shard(0)), 2),
        ((2, 2), (Shard(0), Shard(1)), 4),
    ],
)
def test_shards_become_the_whole_tensor(mesh: tuple[int, ...], placements: tuple[object, ...], writers: int) -> None:
    full = torch.arange(30, dtype=torch.float32).view(5, 6)
    files = [
        bytes(Staging().fill(own_blocks({"w": tensor}, rank, world)))
        for rank, world, tensor in as_rank(full, mesh, placements)
    ]
    assert sum(bool(load(data)) for data in files) == writers
    assert torch.equal(join(map(read_blocks, files))["w"], full)
