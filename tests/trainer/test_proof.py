"""What is refused before the first step: plans that lose or repeat documents, ranks that take others' documents."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dropforge.errors import DataError, DropforgeError
from trainer.data.mix import Mix
from trainer.data.packing import Packs
from trainer.data.plan import Plan, make_packs
from trainer.data.proof import prove
from trainer.gang import Gang

from .ranks import Ranks

COUNT = 300


def plan(*, seed: int = 3, packed: bool = True, mix: Mix | None = None, packs: Packs | None = None) -> Plan:
    sizes = np.random.default_rng(0).integers(2, 65, COUNT).astype(np.int64)
    return Plan(sizes, sizes - 1, seed, 64, 8, packed, epochs=2.5, max_steps=None, mix=mix, packs_of=packs)


def three_sources(*passes: float) -> Mix:
    return Mix(np.arange(COUNT, dtype=np.int32) % 3, ("a", "b", "c"), passes)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mix", [None, three_sources(1, 2, 0.5), three_sources(0, 0.3, 3.7)])
def test_a_right_plan_is_proven(packed: bool, mix: Mix | None) -> None:
    found = prove(plan(packed=packed, mix=mix), Gang(), 2)
    assert (found.documents, found.epochs, found.epochs_counted, found.ranks) == (COUNT, 3, 3, 1)
    assert 3 <= found.steps_compared <= 34


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("duplicated", r"epoch 1: document \d+ is missing in it"),
        ("missing", r"document \d+ is missing"),
        ("too long", "a pack holds 6[5-9] tokens|a pack holds [7-9]\\d|a pack holds 1\\d\\d"),
    ],
)
def test_a_changed_plan_is_refused_at_once(harm: str, words: str) -> None:
    right = plan()
    packs = make_packs(right.lengths, 64, True, None)
    documents, offsets = packs.documents.copy(), packs.offsets.copy()
    if harm == "duplicated":
        documents[7] = documents[8]
    elif harm == "missing":
        documents, offsets = documents[:-1], offsets.copy()
        offsets[-1] -= 1
    else:
        offsets = np.delete(offsets, 1)  # the first two packs in one
    began = time.process_time()  # others may have the cores
    with pytest.raises(DataError, match=words):
        prove(plan(packs=Packs(documents, offsets)), Gang(), 2)
    assert time.process_time() - began < 1


def test_a_document_of_a_source_that_is_left_out_is_refused() -> None:
    mix = three_sources(1, 1, 0)
    right = plan(mix=mix)
    packs = make_packs(right.lengths, 64, True, mix)
    documents = packs.documents.copy()
    out = int(np.flatnonzero(mix.source == 2)[0])
    documents[1] = out
    with pytest.raises(DataError, match="epoch 1"):
        prove(plan(mix=mix, packs=Packs(documents, packs.offsets)), Gang(), 2)


def proven(gang: Gang, seeds: list[int], packed: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        return prove(plan(seed=seeds[gang.rank], packed=packed, mix=three_sources(1, 2, 0.5)), gang, 2).plain()
    except DropforgeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}


def stingy(gang: Gang) -> dict[str, Any]:
    """One rank keeps nothing of what is its own."""
    mine = plan()
    if gang.rank == 1:
        share = mine.share
        mine.share = lambda *arguments: [batch[:0] for batch in share(*arguments)]  # type: ignore[method-assign]
    try:
        return prove(mine, gang, 2).plain()
    except DropforgeError as error:
        return {"error": str(error)}


@pytest.mark.dist
def test_ranks_prove_together_that_they_share_all_and_overlap_nowhere(ranks: Ranks) -> None:
    for packed in (True, False):
        found = ranks(proven, 2, [3, 3], packed)
        assert found[0] == found[1]
        assert (found[0]["ranks"], found[0]["epochs_counted"]) == (2, 3)


@pytest.mark.dist
def test_a_rank_with_another_seed_is_refused_on_all(ranks: Ranks) -> None:
    found = ranks(proven, 3, [3, 3, 4], True)
    assert len({one["error"] for one in found}) == 1
    assert "taken too often" in found[0]["error"] or "missing" in found[0]["error"]
    assert all(one["seconds"] < 5 for one in found)


@pytest.mark.dist
def test_a_rank_that_takes_less_is_refused_on_all(ranks: Ranks) -> None:
    found = ranks(stingy, 2)
    assert [("missing" in one["error"]) for one in found] == [True, True]
