"""How a step's packs are dealt to ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.balance import costs, spread
from trainer.data.plan import Plan

COSTS = st.lists(st.floats(0, 1e9, allow_nan=False), max_size=60)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 9))
def test_each_item_goes_to_one_rank_and_all_get_as_many(values: list[float], world: int) -> None:
    dealt = spread(values, world)
    assert sorted(index for part in dealt for index in part) == list(range(len(values)))
    assert {len(part) for part in dealt} <= {len(values) // world, -(-len(values) // world)}
    assert dealt == spread(values, world)
    in_turn = sorted(values, reverse=True)
    assert max(sum(values[index] for index in part) for part in dealt) <= max(
        sum(in_turn[rank::world]) for rank in range(world)
    ) * (1 + 1e-9)


def test_the_cost_of_a_pack_is_that_of_its_documents() -> None:
    """Eight short documents cost less than one as long as all of them."""
    lengths = np.array([512, *[64] * 8], dtype=np.int64)
    long, short = costs([np.arange(1), np.arange(1, 9)], lengths, linear=100.0)
    assert long == 512**2 + 100 * 512
    assert short == 8 * 64**2 + 100 * 512


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_have_about_the_same_work(world: int) -> None:
    sizes = np.random.default_rng(0).lognormal(6, 1.1, 4000).clip(16, 8192).astype(np.int64)
    whole = Plan(sizes, sizes - 1, seed=1, size=8192, rows=64, packed=True, epochs=1.0, max_steps=None, linear=4096.0)
    worst = 0.0
    for step in range(whole.steps - 1):
        loads = [
            sum(costs([pack for batch in whole.share(whole.step(step), rank, world, 4) for pack in batch], sizes, 4096))
            for rank in range(world)
        ]
        worst = max(worst, max(loads) * world / sum(loads))
    assert worst < 1.05
