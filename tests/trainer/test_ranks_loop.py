"""The loop on several ranks: what happens to one of them, all of them act on alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.gang import Gang

from .ranks import Ranks
from .ranks_loop import Stage, Tensors, copied, make_loop, make_stage
from .toy import Toy

pytestmark = [pytest.mark.dist, pytest.mark.compat]


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "loop", tmp_path / "scratch")


def nan_on_one(gang: Gang, stage: Stage) -> tuple[list[Tensors], int, list[str]]:
    loop = make_loop(gang, stage, True)
    said: list[str] = []
    loop.console.say = said.append  # type: ignore[method-assign]
    loop.start()
    loop.loss.train()
    forward = loop.loss.forward
    weights = []
    for index in range(4):
        if (index, gang.rank) == (2, 1):
            loop.loss.forward = lambda *inputs: forward(*inputs) * float("nan")  # type: ignore[method-assign]
        loop._step()
        loop.loss.forward = forward  # type: ignore[method-assign]
        weights.append(copied(loop.wrapped.full(dict(loop.wrapped.trainable()))))
    return weights, loop.progress.skipped, said


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_loss_that_is_nan_on_one_rank_is_skipped_by_both(ranks: Ranks, stage: Stage, mode: str) -> None:
    (weights, skipped, said), (_, skipped_too, _) = ranks(nan_on_one, 2, stage.change(parallel=mode))
    assert skipped == skipped_too == 1
    assert any(line.startswith("step 3: loss") for line in said)
    two, three, four = weights[1:]
    assert all(torch.equal(two[name], three[name]) for name in two)
    assert not all(torch.equal(three[name], four[name]) for name in two)
    assert all(bool(weight.isfinite().all()) for weight in four.values())
