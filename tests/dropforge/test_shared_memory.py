"""A pod's /dev/shm holds NCCL's segments and fast checkpoints, and nothing of the data."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.errors import RecipeError
from dropforge.estimate import check_memory, estimate
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, merge
from dropforge.shared_memory import RANK, check_shared_memory, least_bytes

GB = 10**9


def recipe(train: dict[str, Any] | None = None, **compute: Any) -> Recipe:
    over = {"compute": {"backend": "kubernetes", **compute}, "train": {"tokens_per_step": 1 << 16, **(train or {})}}
    return build_recipe(merge(load_recipe("tiny").plain(), over))


def fast(folder: str, keep: int = 1) -> dict[str, Any]:
    return {"fast_checkpoints": {"folder": folder, "every": 2, "keep": keep}}


def test_what_takes_none_has_room() -> None:
    assert least_bytes(recipe(processes_per_node=2), 10 * GB) == {}
    assert least_bytes(recipe(gpus=1), None) == {}
    assert least_bytes(recipe(fast("/disk")), 10 * GB) == {}
    assert least_bytes(recipe(fast("/dev/shmall")), 10 * GB) == {}
    check_shared_memory(recipe(fast("/dev/shm"), memory_gb=1), None)  # nobody knows how large


@pytest.mark.parametrize("folder", ["/dev/shm", "/dev/shm/", "/dev/shm/fast"])
def test_fast_checkpoints_are_counted_as_many_as_there_are_at_a_time(folder: str) -> None:
    asked = recipe(fast(folder, keep=2), memory_gb=11)
    with pytest.raises(RecipeError, match=r"11 GB is its /dev/shm, which has to hold 3 checkpoints 6 GB.*Set it to 12"):
        check_shared_memory(asked, 2 * GB)
    check_shared_memory(recipe(fast(folder, keep=2), memory_gb=12), 2 * GB)
    check_shared_memory(recipe(fast(folder, keep=2), memory_gb=6, nodes=2), 2 * GB)
    check_shared_memory(recipe(fast(folder, keep=2), backend="local", memory_gb=1), 2 * GB)
    volume = {"claim": "fast", "path": "/dev/shm", "read_only": False}
    check_shared_memory(recipe(fast(folder, keep=2), memory_gb=1, volumes=[volume]), 2 * GB)


def test_ranks_with_gpus_have_room_for_nccl() -> None:
    asked = recipe(gpus=8, processes_per_node=8, memory_gb=1)
    assert least_bytes(asked, None) == {"NCCL of 8 ranks": 8 * RANK}
    with pytest.raises(RecipeError, match=r"NCCL of 8 ranks 0\.537 GB\. Set it to 2 or more$"):
        check_shared_memory(asked, None)
    check_shared_memory(recipe(gpus=8, processes_per_node=8, memory_gb=2), None)


def test_a_plan_refuses_it() -> None:
    asked = recipe(gpus=8, processes_per_node=8, memory_gb=1)
    with pytest.raises(RecipeError, match=r"/dev/shm"):
        check_memory(asked, estimate(asked))
