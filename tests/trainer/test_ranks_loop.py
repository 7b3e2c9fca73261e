"""The loop on several ranks: what happens to one of them, all of them act on alike."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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


def slow_leader(gang: Gang) -> bool:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if gang.leader:
        time.sleep(2.5)  # it writes a large model
    gang.follow("there")
    return True


def test_ranks_wait_for_a_slow_leader_longer_than_for_a_collective(ranks: Ranks) -> None:
    assert ranks(slow_leader, 2) == [True, True]


def slow_best(gang: Gang, stage: Stage) -> bool:
    """Whether nobody began another step while rank 0 was writing the best weights."""
    loop = make_loop(gang, stage, True)
    kept = Path(loop.checkpoints.store.uri) / "kept"
    keep, step = loop.best.keep, loop.heart.step
    early: list[int] = []

    def slow(*arguments: object) -> None:
        time.sleep(0.5)
        keep(*arguments)  # type: ignore[arg-type]
        kept.touch()

    def begin(number: int) -> None:
        if number > 2 and not kept.exists():
            early.append(number)
        step(number)

    loop.best.keep, loop.heart.step = slow, begin  # type: ignore[method-assign,assignment]
    loop.start()
    loop.run()
    return kept.exists() and not early


def test_nobody_waits_in_a_step_while_the_best_weights_are_written(ranks: Ranks, stage: Stage) -> None:
    """The watchdog would take whoever waits there for hung, and end a run that is well."""
    best = stage.change(export="best", eval_every=2, checkpoint_every=0, max_steps=4)
    assert ranks(slow_best, 2, best) == [True, True]
