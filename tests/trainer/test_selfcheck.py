"""Checks before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError
from trainer.loop.selfcheck import TOLERANCE, halves

from .test_loop import Bench
from .toy import Toy


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **overrides: Bench(toy, tmp_path / "scratch", **overrides)


pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("packs", "parts"),
    [
        ([[1, 2], [3]], [[[1, 2]], [[3]]]),
        ([[1, 2, 3]], [[[1]], [[2, 3]]]),
        ([[1]], [[], [[1]]]),
        ([], [[], []]),
    ],
)
def test_a_micro_batch_is_cut_in_two(packs: list[list[int]], parts: list[list[list[int]]]) -> None:
    found = halves([np.array(pack) for pack in packs])
    assert [[pack.tolist() for pack in half] for half in found] == parts


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
