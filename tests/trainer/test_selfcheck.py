"""Checks before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError
from trainer.loop.selfcheck import TOLERANCE, halves, splits

from .test_loop import Bench
from .toy import Toy


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **overrides: Bench(toy, tmp_path / "scratch", **overrides)


pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("packs", "parts", "both"),
    [
        ([[1, 2], [3]], [[[1, 2]], [[3]]], True),
        ([[1, 2, 3]], [[[1]], [[2, 3]]], True),
        ([[1]], [[], [[1]]], False),
        ([], [[], []], False),
    ],
)
def test_a_micro_batch_is_cut_in_two(packs: list[list[int]], parts: list[list[list[int]]], both: bool) -> None:
    arrays = [np.array(pack) for pack in packs]
    assert [[pack.tolist() for pack in half] for half in halves(arrays)] == parts
    assert splits(arrays) == both


def test_one_document_alone_is_not_compared_with_itself(bench: Any) -> None:
    """A difference of 0 would be told as a proof."""
    made = bench(train={"micro_batch": 1})
    loop = made.loop(packs=False)
    loop.start()
    assert loop.accumulation is None
    assert loop.report()["accumulation_difference"] is None
    assert any("is not looked at" in line for line in made.said)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_halves_add_up_to_their_batch(bench: Any, packed: bool, precision: str) -> None:
    made = bench(train={"micro_batch": 1 if packed else 4, "precision": precision})
    loop = made.loop(packs=packed, dropout=0.3)
    before = {name: weight.clone() for name, weight in loop.built.trainable()}
    loop.start()
    assert 0 < loop.accumulation < TOLERANCE[precision]
    assert loop.loss.training
    for name, weight in loop.built.trainable():
        assert torch.equal(weight, before[name])
        assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize("packed", [True, False])
def test_a_loss_that_is_a_mean_is_refused(bench: Any, packed: bool) -> None:
    loop = bench(train={"micro_batch": 4}).loop(packs=packed)
    forward = loop.loss.forward
    loop.loss.forward = lambda ids, positions, places, targets: (
        forward(ids, positions, places, targets) / max(1, len(targets))
    )
    with pytest.raises(DropforgeError, match="do not add up"):
        loop.start()


def test_rows_that_see_each_other_are_refused(bench: Any) -> None:
    loop = bench(train={"micro_batch": 4}).loop()
    norm = loop.built.model.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) - 0.05 * forward(hidden).mean(0, keepdim=True)
    with pytest.raises(DropforgeError, match="do not add up"):
        loop.start()
