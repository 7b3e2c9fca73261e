"""The packing plan: every document once per epoch, whatever the number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.errors import DataError
from trainer.data.balance import share
from trainer.data.packing import pack_window
from trainer.data.plan import Plan


def plan(
    lengths: list[int], *, rows: int = 4, packed: bool = True, epochs: float = 1.0, steps: int | None = None
) -> Plan:
    sizes = np.array(lengths, dtype=np.int64)
    return Plan(sizes, sizes - 1, seed=3, size=64, rows=rows, packed=packed, epochs=epochs, max_steps=steps)


def lengths(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 65, count).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_packs_hold_every_document_once_and_never_too_much(sizes: list[int]) -> None:
    array = np.array(sizes, dtype=np.int64)
    packs = pack_window(array, np.arange(len(sizes)), 64)
    assert sorted(index for pack in packs for index in pack) == list(range(len(sizes)))
    assert all(array[pack].sum() <= 64 for pack in packs)
    # Best-fit decreasing leaves no two packs that are both half empty.
    assert sum(array[pack].sum() <= 32 for pack in packs) <= 1


def test_packing_fills_the_rows() -> None:
    assert plan(lengths(3000)).filled() > 0.97


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_sees_each_document_once_and_the_next_epoch_another_order(packed: bool) -> None:
    whole = plan(lengths(101), packed=packed, epochs=2.0)
    seen = [int(index) for step in range(whole.steps) for pack in whole.step(step) for index in pack]
    assert Counter(seen) == dict.fromkeys(range(101), 2)
    assert [pack.tolist() for pack in whole.epoch(0)] != [pack.tolist() for pack in whole.epoch(1)]


def test_a_step_is_a_pure_function_of_its_number() -> None:
    forward, backward = plan(lengths(101), steps=40), plan(lengths(101), steps=40)
    there = [[pack.tolist() for pack in forward.step(step)] for step in range(40)]
    back = [[pack.tolist() for pack in backward.step(step)] for step in reversed(range(40))]
    assert there == back[::-1]
    assert forward.digest("x") == backward.digest("x") != plan(lengths(102), steps=40).digest("x")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("packed", [True, False])
def test_ranks_share_a_step_without_overlap_and_with_equal_micro_batches(world: int, packed: bool) -> None:
    """Nine rows on two ranks and worse: nobody runs out before the others, which would hang a collective."""
    whole = plan(lengths(9, seed=1), rows=5, packed=packed, epochs=1.5)
    for step in range(whole.steps):
        packs = whole.step(step)
        shares = [share(packs, whole.lengths, rank, world, 2) for rank in range(world)]
        assert len({len(own) for own in shares}) == 1
        found = [pack.tolist() for own in shares for micro in own for pack in micro]
        assert sorted(found) == sorted(pack.tolist() for pack in packs)


def test_steps_follow_from_epochs_or_are_given() -> None:
    assert plan(lengths(101), packed=False, rows=4).steps == 26  # 101 rows of one document, the last step has one
    assert plan(lengths(101), packed=False, rows=4, epochs=0.5).steps == 13
    assert plan(lengths(3), rows=50, steps=7).steps == 7
    assert len(plan(lengths(3), packed=False, rows=50, steps=7).step(6)) == 50  # a step may span many epochs


def test_passes_count_epochs() -> None:
    whole = plan(lengths(10), packed=False, rows=5, epochs=3.0)
    assert [whole.passes(step) for step in (0, 1, 2, 6)] == [0.0, 0.5, 1.0, 3.0]


@pytest.mark.parametrize("packed", [True, False])
def test_a_late_step_needs_no_earlier_epoch(packed: bool) -> None:
    """A resume at step 30,000 makes what a resume at step 3 makes: the epochs that its step is in."""
    made = []
    for step in (3, 30_000):
        whole = plan(lengths(101), packed=packed, steps=40_000)
        whole.step(step)
        whole.passes(step)
        made.append(set(whole._recent))
    epoch = 30_000 * 4 // whole.packs_per_epoch
    assert made[0] <= {0, 1}
    assert made[1] <= {epoch, epoch + 1}


def test_every_epoch_deals_documents_of_one_length_to_other_packs() -> None:
    whole = plan([30] * 20 + [34] * 20, epochs=9.0)
    assert whole.packs_per_epoch == 20
    pairs = [{tuple(sorted(pack.tolist())) for pack in whole.epoch(index)} for index in range(9)]
    assert all(len(one) == 20 for one in pairs)
    assert len(set.union(*pairs)) > 100


def test_the_order_is_that_of_every_version() -> None:
    """Made with NumPy 2.4; another version or machine that orders otherwise would resume to other samples."""
    whole = plan([45, 40, 40, 33, 33, 31, 31, 20, 20, 20, 9, 2], epochs=2.0)
    assert [pack.tolist() for pack in whole.step(1)] == [[2, 9], [3, 6], [4, 6], [2, 8, 11]]


def test_no_documents_is_an_error_with_a_mend() -> None:
    with pytest.raises(DataError, match="train split"):
        plan([])
