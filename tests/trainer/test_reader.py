"""A checkpoint of sharded tensors is read on another mesh, from as few files as it takes, none of them unchecked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from dropforge.errors import DropforgeError
from dropforge.store import FolderStore
from trainer.state.blocks import Staging, own_blocks
from trainer.state.checkpoint import Checkpoints, Seal, rank_file
from trainer.state.reader import BlockReader, Copies, fill

from .test_blocks import as_rank

FULL = torch.arange(35, dtype=torch.float32).view(7, 5)
MESHES = [
    ((1,), (Shard(0),)),
    ((2,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((4,), (Shard(1),)),  # five columns over four ranks: the last holds none
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(FolderStore(tmp_path), "run", "plan", {}, pause=0.0)


def saved(checkpoints: Checkpoints, mesh: tuple[int, ...], placements: tuple[object, ...]) -> Seal:
    files = {}
    for rank, world, tensor in as_rank(FULL, mesh, placements):
        blocks = own_blocks({"weights/w": tensor, "moments/w:step": torch.tensor(4.0)}, rank, world)
        files[rank_file(rank)] = checkpoints.write(4, rank_file(rank), Staging().fill(blocks))
    files["progress.json"] = checkpoints.write(4, "progress.json", b"{}")
    return checkpoints.seal(4, len(files) - 1, files)


@pytest.mark.parametrize("writes", MESHES)
@pytest.mark.parametrize("reads", MESHES)
def test_any_mesh_reads_what_any_other_wrote(checkpoints: Checkpoints, writes: tuple, reads: tuple) -> None:  # type: ignore[type-arg]
    seal = saved(checkpoints, *writes)
    for _, _, wanted in as_rank(FULL, *reads):
        expected = wanted.to_local().clone()
        wanted.to_local().zero_()
        step = torch.tensor(0.0)
        fill(BlockReader(Copies(checkpoints, seal)), {"weights/w": wanted, "moments/w:step": step})
        assert torch.equal(wanted.to_local(), expected)
        assert step == 4.0


def test_a_rank_fetches_only_files_that_it_needs(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = saved(checkpoints, (4,), (Shard(0),))
    fetched: list[str] = []
    visit = Checkpoints.visit
    monkeypatch.setattr(
        Checkpoints, "visit", lambda self, seal, name, *more: fetched.append(name) or visit(self, seal, name, *more)
    )
    for rank, _, wanted in as_rank(FULL, (4,), (Shard(0),)):
        fetched.clear()
        fill(BlockReader(Copies(checkpoints, seal), rank), {"weights/w": wanted, "moments/w:step": torch.tensor(0.0)})
        assert fetched == [rank_file(rank)]


@pytest.mark.parametrize("place", [4, 30, -1])  # in the length of the header, in the header, in the data
def test_a_flipped_bit_is_told_and_changes_nothing_unnoticed(
    checkpoints: Checkpoints, tmp_path: Path, place: int
) -> None:
    seal = saved(checkpoints, (1,), (Shard(0),))
    path = tmp_path / "checkpoints" / "step-4" / rank_file(0)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises((DropforgeError, ValueError, KeyError)):
        fill(BlockReader(Copies(checkpoints, seal)), {"weights/w": torch.zeros(7, 5)})


def test_what_the_checkpoint_lacks_is_told(checkpoints: Checkpoints) -> None:
    seal = saved(checkpoints, (1,), (Shard(0),))
    with pytest.raises(RuntimeError, match="weights/other"):
        fill(BlockReader(Copies(checkpoints, seal)), {"weights/other": torch.zeros(7, 5)})
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)size"):
        fill(BlockReader(Copies(checkpoints, seal)), {"weights/w": torch.zeros(7, 6)})
