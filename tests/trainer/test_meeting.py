"""Ranks meet before they form a group: a slow node breaks nothing, and a lost one is named."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import trainer.gang
from trainer.gang import CollectiveError, Gang

from .ranks import Ranks, RanksError


def alone(gang: Gang, folder: Path) -> None:
    """As the launcher leaves a rank: with a store that the agent holds, and without a group."""
    gang.barrier()  # who leaves closes what the other may still be connecting
    gang.leave()
    place = folder / "port"
    if gang.leader:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        globals()["_held"] = store
        (folder / ".port").write_text(str(store.port))
        (folder / ".port").rename(place)
    while not place.exists():
        time.sleep(0.02)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.read_text(), "RANK": str(gang.rank),
        "WORLD_SIZE": str(gang.world), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    trainer.gang.TIMEOUT = timedelta(seconds=3)  # type: ignore[misc]
    trainer.gang._TELL = 0.5  # type: ignore[misc]


def slow(gang: Gang, folder: Path) -> list[float]:
    """Rank 1 builds its model until rank 0 has waited for longer than a collective may take."""
    alone(gang, folder)
    said = folder / "said"

    def say(text: str) -> None:
        with said.open("a") as stream:
            stream.write(f"{text}\n")

    while gang.rank == 1 and not (said.exists() and len(said.read_text().splitlines()) >= 9):
        time.sleep(0.02)
    gang.connect(say)
    found = gang.sum([1.0])
    gang.barrier()
    return found


def lost(gang: Gang, folder: Path) -> None:
    alone(gang, folder)
    trainer.gang.MEETING = timedelta(seconds=1)  # type: ignore[misc]
    if gang.leader:
        gang.connect()


def test_a_node_that_builds_its_model_for_longer_than_a_collective_may_take_breaks_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(slow, 2, tmp_path) == [[2.0], [2.0]]
    assert set((tmp_path / "said").read_text().splitlines()) == {"waiting for 1 of 2 ranks: 1"}


def test_a_rank_that_never_comes_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksError) as failed:
        ranks(lost, 2, tmp_path)
    assert isinstance(failed.value.errors[0], CollectiveError)
    assert "had not built their model: 1" in str(failed.value.errors[0])
