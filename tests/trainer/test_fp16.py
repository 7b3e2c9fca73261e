"""Training in fp16: the loss is scaled, and an overflow costs time and no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.loop.divergence import BAD_STEPS, DivergedError
from trainer.loop.scale import STEADY, Scale

from .ranks import Ranks
from .ranks_loop import Stage, Tensors, copied, make_loop, make_stage
from .test_loop import bench, moments, trained, weights  # noqa: F401 - a fixture
from .test_ranks_pitfalls import Poison
from .toy import Toy

TOO_LARGE = Scale(2.0**40, 7)  # every gradient of a step overflows with it
FP16: dict[str, Any] = {"precision": "fp16", "max_steps": 4, "checkpoint_every": 2}


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_scale_is_halved_by_an_overflow_and_doubled_after_many_steps_without_one() -> None:
    assert Scale(8.0, 5).lowered() == Scale(4.0, 0)
    assert Scale(1.0, 5).lowered() is None
    found = Scale(8.0)
    for _ in range(STEADY - 1):
        found = found.stepped()
    assert found == Scale(8.0, STEADY - 1)
    assert found.stepped() == Scale(16.0, 0)


def test_only_fp16_has_a_scale(bench: Any) -> None:  # noqa: F811
    for precision, scale in (("fp32", None), ("bf16", None), ("fp16", Scale())):
        assert bench(train={"precision": precision}).loop().step.scale == scale


def test_a_step_that_overflows_is_taken_again_and_loses_no_row(bench: Any) -> None:  # noqa: F811
    """To the bit what the scale that fitted at last would have made of it at once: scales are powers of two."""
    one = bench(train=FP16)
    again = one.loop(folder="again")
    again.step.scale = TOO_LARGE
    trained(again)
    settled = again.step.scale
    assert settled is not None
    assert (again.progress.skipped, again.progress.skips) == (0, [])
    assert again.progress.overflows > 5
    assert (again.progress.loss_scale, again.progress.steady) == (settled.value, settled.steady)
    assert sum("too large for fp16" in line for line in one.said) == 1
    once = one.loop(folder="once")
    once.step.scale = Scale(settled.value)
    trained(once)
    assert once.progress.overflows == 0
    assert same(weights(again), weights(once))
    for counter in ("step", "tokens", "targets"):
        assert getattr(again.progress, counter) == getattr(once.progress, counter)
    assert again.report()["overflows"] == again.progress.overflows
    assert again.report()["loss_scale"] == settled.value


def test_gradients_that_fp16_would_lose_are_kept_by_the_scale(bench: Any) -> None:  # noqa: F811
    """Of one millionth of the loss: unscaled, many of them are zero in fp16; scaled, they are those of fp32."""

    def gradient(precision: str, scale: float) -> torch.Tensor:
        loop = bench(train={"precision": precision}).loop()
        loop.loss.eval()
        loop.wrapped.backward(make_batch(loop.train, loop.plan.step(0)[:2], loop.pad), 1e-6 * scale, True)
        loop.wrapped.clip(float("inf"), scale)
        return torch.cat([weight.grad.ravel() for _, weight in loop.built.trainable()])

    exact = gradient("fp32", 1.0)
    scaled, plain = gradient("fp16", 2.0**20), gradient("fp16", 1.0)
    assert (scaled - exact).norm() < 1e-2 * exact.norm()
    assert (plain - exact).norm() > 2e-2 * exact.norm()


def test_a_resume_goes_on_with_the_scale_to_the_bit(bench: Any) -> None:  # noqa: F811
    one = bench(train=FP16)
    whole = one.loop(folder="whole", dropout=0.1)
    whole.step.scale = TOO_LARGE
    trained(whole)
    first = one.loop(folder="parts", dropout=0.1)
    first.step.scale = TOO_LARGE
    first.steps = 2
    trained(first)
    second = one.loop(folder="parts", dropout=0.1)
    assert second.resume() == 2
    assert second.step.scale == first.step.scale != Scale()
    trained(second)
    assert second.step.scale == whole.step.scale
    assert second.progress.overflows == whole.progress.overflows > 0
    assert same(weights(whole), weights(second))
    assert same(moments(whole), moments(second))


def test_a_gradient_that_no_scale_mends_is_a_skipped_step_and_ends_the_run_at_last(bench: Any) -> None:  # noqa: F811
    loop = bench(train={"precision": "fp16", "max_steps": 12}).loop()
    loop.start()
    loop.loss.train()
    loop._step()
    loop.step.scale = scale = Scale(8.0, 3)
    before, forward = weights(loop), loop.loss.forward
    passes: list[torch.Tensor] = []

    def poisoned(*inputs: Any) -> Any:
        passes.append(Poison.apply(forward(*inputs), float("inf")))
        return passes[-1]

    loop.loss.forward = poisoned
    loop._step()
    assert loop.progress.skipped == 1
    assert loop.progress.overflows == 3  # down to a scale of 1, and no further
    assert len(passes) == 4 * loop.batching.accumulation
    assert loop.step.scale == scale  # it was none of the scale's doing
    assert same(weights(loop), before)
    for _ in range(BAD_STEPS - 1):
        loop._step()
    with pytest.raises(DivergedError, match=f"{BAD_STEPS + 1} steps in a row"):
        loop._step()


def test_a_loss_that_is_not_finite_is_not_tried_again(bench: Any) -> None:  # noqa: F811
    loop = bench(train={"precision": "fp16", "max_steps": 12}).loop()
    loop.start()
    loop.loss.train()
    forward, passes = loop.loss.forward, []

    def broken(*inputs: Any) -> Any:
        passes.append(forward(*inputs) * float("nan"))
        return passes[-1]

    loop.loss.forward = broken
    loop._step()
    assert (loop.progress.skipped, loop.progress.overflows) == (1, 0)
    assert len(passes) == loop.batching.accumulation
    assert loop.step.scale == Scale()


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "fp16", tmp_path / "scratch", train={"precision": "fp16"})


def overflow_on_one(gang: Gang, stage: Stage, poisoned: int | None) -> tuple[Tensors, list[float], float, int, int]:
    """Three steps; in the second one rank's gradient overflows, once, or it begins with half the scale."""
    loop = make_loop(gang, stage, True)
    loop.start()
    loop.loss.train()
    forward, passed = loop.loss.forward, [0]

    def once(*inputs: Any) -> Any:
        loss = forward(*inputs)
        passed[0] += 1
        if (loop.progress.step, gang.rank, passed[0]) == (1, poisoned, 1):
            return Poison.apply(loss, float("inf"))
        return loss

    norms = []
    loop.loss.forward = once  # type: ignore[method-assign]
    take = loop.step.take

    def noted(*values: Any) -> Any:
        passed[0] = 0
        result = take(*values)
        norms.append(result.norm)
        return result

    loop.step.take = noted  # type: ignore[method-assign]
    for index in range(3):
        if index == 1 and poisoned is None:
            loop.step.scale = Scale(Scale().value / 2)
        loop._step()
    assert loop.step.scale is not None
    whole = copied(loop.wrapped.full(dict(loop.wrapped.trainable())))
    return whole, norms, loop.step.scale.value, loop.progress.overflows, loop.progress.skipped


@pytest.mark.dist
@pytest.mark.compat
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_has_all_take_the_step_again(ranks: Ranks, stage: Stage, mode: str) -> None:
    stage = stage.change(parallel=mode)
    plain = ranks(overflow_on_one, 2, stage, None)[0]
    (found, norms, scale, overflows, skipped), (_, *other) = ranks(overflow_on_one, 2, stage, 1)
    assert other == [norms, scale, overflows, skipped]
    assert (scale, overflows, skipped) == (Scale().value / 2, 1, 0)
    assert norms == plain[1]
    assert same(found, plain[0])
