"""The ranks that tests fork: results and failures come back, and one that hangs shows where."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from trainer.gang import CollectiveError, Gang

from .ranks import IMPORTED_BY, Ranks, RanksError

pytestmark = pytest.mark.dist


def who(gang: Gang, values: list[float]) -> tuple[list[float], int, bool]:
    return gang.sum([value * (gang.rank + 1) for value in values]), gang.rank, os.getppid() == IMPORTED_BY


def fails_on_one(gang: Gang) -> None:
    if gang.rank == 1:
        raise ValueError("no luck")
    gang.barrier()


def hangs_on_one(gang: Gang) -> None:
    if gang.rank == 1:
        a_place_to_wait()


def a_place_to_wait() -> None:
    threading.Event().wait()


def dies(gang: Gang) -> None:
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_by_rank_from_processes_that_imported_nothing(ranks: Ranks, world: int) -> None:
    sums = [float(world * (world + 1) // 2), 0.0]
    assert ranks(who, world, [1.0, 0.0]) == [(sums, rank, True) for rank in range(world)]


def test_tensors_outlive_their_rank(ranks: Ranks) -> None:
    assert [item.tolist() for item in ranks(range_of_rank, 2)] == [[], [0]]


def range_of_rank(gang: Gang) -> torch.Tensor:
    return torch.arange(gang.rank)


def test_an_exception_comes_back_with_its_trace_and_the_peers_end_too(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"(?s)^rank 1 ended with 1:.*in fails_on_one.*ValueError: no luck") as caught:
        ranks(fails_on_one, 2)
    errors: dict[int, Any] = caught.value.errors
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], CollectiveError)


def test_a_rank_that_hangs_is_ended_and_shows_its_stacks(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"(?s)rank 1 hung:.*in a_place_to_wait"):
        ranks(hangs_on_one, 2, limit=6.0)  # until then both have to be there


def test_a_rank_that_dies_is_told(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="rank 0 ended with -9"):
        ranks(dies, 1)
