"""The loop in one process: what must not change the result does not, and what is broken does no harm."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.errors import DataError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import build, make_plan, pad_id
from trainer.config import Settings, read_settings
from trainer.data.balance import share
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.loop.divergence import BAD_STEPS, DivergedError
from trainer.loop.loop import Loop
from trainer.loop.optim import optimizer_tensors
from trainer.measure import measure
from trainer.model.loss import LossModel, choose_way, loss_model
from trainer.prepare import await_prepared, prepare
from trainer.report.console import Console
from trainer.report.tracking import Tracker
from trainer.state.checkpoint import Checkpoints
from trainer.state.fast import Fast
from trainer.state.stop import PreemptedError, StopSignal

from .toy import Toy, sample_rows, write_dataset


class Bench:
    """Prepares a run once and makes loops over it, each with a fresh model."""

    def __init__(self, toy: Toy, scratch: Path, **overrides: Any) -> None:
        self.spec = RunSpec.from_json(Path(toy.run("bench", **overrides)).read_bytes())
        self.settings = read_settings(self.spec.recipe)
        prepare(self.spec, self.settings, scratch, lambda: None, lambda _: None)
        self.prepared = await_prepared(self.settings, self.spec, scratch, lambda: None)
        self.said: list[str] = []

    def loop(
        self, settings: Settings | None = None, packs: bool = True, folder: str = "a", dropout: float = 0.0
    ) -> Loop:
        settings = settings or self.settings
        gang = Gang()
        built = build(settings, self.prepared, gang)
        for layer in built.model.model.layers:
            layer.self_attn.attention_dropout = dropout
        plan = make_plan(settings, self.prepared, packs)
        loss = loss_model(built.model, packs)
        loss.precision = settings.train.precision
        pad = pad_id(self.prepared.tokenizer)
        choose_way(loss, make_batch(self.prepared.train, plan.step(0)[:1], pad))
        store = open_store(f"{self.spec.root}/{folder}")
        checkpoints = Checkpoints(store, "bench", plan.digest("x"), {"a": "1"}, self.said.append)
        fast = settings.train.fast_checkpoints
        loop = Loop(
            gang=gang,
            settings=settings,
            built=built,
            loss=loss,
            plan=plan,
            train=self.prepared.train,
            eval=self.prepared.eval,
            pad=pad,
            checkpoints=checkpoints,
            fast=Fast(checkpoints, fast.folder, fast.keep) if fast else None,
            stop=StopSignal(),
            console=Console(quiet=True),
            tracker=Tracker(None, self.said.append),
            prompts=self.prepared.prompts,
            tokenizer=self.prepared.tokenizer,
        )
        loop.console.say = self.said.append  # type: ignore[method-assign]
        return loop


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **overrides: Bench(toy, tmp_path / "scratch", **overrides)


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in loop.built.trainable()}


def moments(loop: Loop) -> dict[str, torch.Tensor]:
    return optimizer_tensors(loop.optimizer, loop.built.trainable())


def trained(loop: Loop) -> Loop:
    loop.start()
    loop.run()
    return loop


def test_micro_batches_do_not_change_the_update(bench: Any) -> None:
    """8 x 1, 3 + 3 + 2 and 1 x 8: rows of varied length, normalised by all targets of the step."""
    results = []
    for micro in (1, 3, 8):
        one = bench(train={"micro_batch": micro, "max_steps": 3})
        results.append(weights(trained(one.loop(folder=f"m{micro}"))))
    for other in results[1:]:
        assert all(torch.allclose(results[0][name], other[name], atol=2e-6) for name in other)


def test_the_sum_of_two_ranks_shares_is_the_whole_step(bench: Any) -> None:
    """What two ranks add up is what one rank computes, with unequal numbers of targets on them."""
    loop = bench(train={"micro_batch": 3}).loop()
    packs = loop.plan.step(0)
    wanted = sum(int(loop.plan.targets[pack].sum()) for pack in packs)
    gradients = []
    for world in (1, 2, 3):
        loop.loss.zero_grad()
        for rank in range(world):
            for mine in share(packs, loop.plan.lengths, rank, world, 3):
                batch = make_batch(loop.train, mine, loop.pad)
                (loop.loss(batch.ids, batch.positions, batch.places, batch.targets) / wanted).backward()
        gradients.append([weight.grad.clone() for _, weight in loop.built.trainable()])
    for other in gradients[1:]:
        assert all(torch.allclose(left, right, atol=1e-6) for left, right in zip(gradients[0], other, strict=True))


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(bench: Any) -> None:
    made = bench()
    whole = trained(made.loop(folder="whole", dropout=0.1))
    first = made.loop(folder="parts", dropout=0.1)
    first.start()
    step = first._step

    def stop_at_six() -> bool:
        if first.progress.step == 5:
            first.stop.since = time.monotonic()
        return step()

    first._step = stop_at_six  # type: ignore[method-assign]
    with pytest.raises(PreemptedError, match="step 6"):
        first.run()
    second = made.loop(folder="parts", dropout=0.1)
    assert second.resume() == 6
    torch.rand(17)  # another history of the generator must not matter
    trained(second)
    left, right = weights(whole), weights(second)
    assert all(torch.equal(left[name], right[name]) for name in left)
    left, right = moments(whole), moments(second)
    assert len(left) == 3 * len(weights(whole))
    assert all(torch.equal(left[name], right[name]) for name in left)
    same = ("step", "tokens", "targets", "skipped", "loss_first", "loss_last", "evaluations")
    assert [getattr(whole.progress, name) for name in same] == [getattr(second.progress, name) for name in same]
    assert whole.report()["eval"] == second.report()["eval"]


def poison(loop: Loop, bad: set[int], value: float = math.nan) -> None:
    """Make the loss of some steps (counted from 0) not finite."""
    forward = loop.loss.forward

    def poisoned(*inputs: torch.Tensor) -> torch.Tensor:
        found = forward(*inputs)
        return found * value if loop.progress.step in bad and loop.loss.training else found

    loop.loss.forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_said(bench: Any, value: float) -> None:
    loop = bench(train={"max_steps": 4}).loop()
    poison(loop, {1}, value)
    loop.start()
    loop.loss.train()
    loop._step()
    before = weights(loop)
    loop._step()
    assert all(torch.equal(before[name], weight) for name, weight in weights(loop).items())
    assert loop.progress.skipped == 1
    loop._step()
    assert loop.progress.in_row == 0
    assert not all(torch.equal(before[name], weight) for name, weight in weights(loop).items())
    assert math.isfinite(loop.progress.loss_last or math.nan)


def test_too_many_bad_steps_end_the_run(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    loop = bench().loop()
    poison(loop, set(range(2, 100)))
    loop.start()
    with pytest.raises(DivergedError, match="in a row"):
        loop.run()
    assert loop.progress.skipped == BAD_STEPS + 1


def test_evaluation_does_not_depend_on_batches_or_packing(bench: Any) -> None:
    loop = bench().loop()
    found = [
        measure(way, loop.eval, Gang(), size=size, micro=micro, pad=0)
        for way, size in ((loop.loss, 64), (_unpacked(loop.loss), 64))
        for micro in (1, 4, 16)
    ]
    assert len({(item.targets, item.accuracy, item.rows) for item in found if item}) == 1
    assert all(item.loss == pytest.approx(found[0].loss, rel=1e-6) for item in found if item and found[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_does_not_depend_on_the_number_of_ranks(bench: Any, world: int) -> None:
    """Ranks' shares add up to what one rank measures, also with fewer batches than ranks."""
    loop = bench().loop()
    alone = measure(loop.loss, loop.eval, Gang(), size=64, micro=4, pad=0)
    assert alone is not None
    for way, micro in ((loop.loss, 1), (loop.loss, 3), (loop.loss, 50), (_unpacked(loop.loss), 4)):
        shares: list[list[float]] = []
        for rank in range(world):
            measure(way, loop.eval, Listening(rank, world, shares), size=64, micro=micro, pad=0)
        nats, right, targets = (math.fsum(column) for column in zip(*shares, strict=True))
        assert targets == alone.targets
        assert right / targets == pytest.approx(alone.accuracy, rel=1e-12)
        assert nats / targets == pytest.approx(alone.loss, rel=1e-6)
    assert alone.bits_per_byte == pytest.approx(
        alone.loss * alone.targets / math.log(2) / loop.eval.facts["target_bytes"]
    )


class Listening(Gang):
    """A rank alone that keeps what it would add to the others' sums."""

    def __init__(self, rank: int, world: int, shares: list[list[float]]) -> None:
        super().__init__(rank, world)
        object.__setattr__(self, "shares", shares)

    def sum(self, values: list[float]) -> list[float]:
        if len(values) > 1:  # a look at the stop signal is one number
            self.shares.append(values)  # type: ignore[attr-defined]
        return values


def test_a_bf16_training_is_evaluated_in_fp32_unless_the_recipe_says_bf16(bench: Any) -> None:
    loop = bench(train={"precision": "bf16"}).loop()
    plain = LossModel(loop.loss.model, True, way=loop.loss.way)
    exact = measure(plain, loop.eval, Gang(), size=64, micro=loop.settings.train.micro_batch, pad=loop.pad)
    found = loop.evaluate("now")
    assert found is not None
    assert exact is not None
    assert found.loss == exact.loss
    assert found.plain()["precision"] == "fp32"
    assert loop.loss.precision == "bf16"  # the training goes on in its own arithmetic
    rough = bench(train={"precision": "bf16"}, evaluate={"precision": "bf16"}).loop().evaluate("now")
    assert rough.precision == "bf16"
    assert rough.loss != exact.loss
    assert rough.loss == pytest.approx(exact.loss, rel=2e-4)


def test_an_evaluation_split_without_a_target_is_refused_before_the_first_step(tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    mute = [{"messages": [{"role": "user", "content": f"a {index}"}]} for index in range(5)]
    made = Toy(root, write_dataset(open_store(root), {"train": sample_rows(20), "eval": mute}))
    with pytest.raises(DataError, match="no evaluation row has a token to learn from"):
        Bench(made, tmp_path / "scratch")


def _unpacked(loss: LossModel) -> LossModel:
    return LossModel(loss.model, False, way=loss.way)


def test_padding_learns_what_packing_learns(bench: Any) -> None:
    """The same documents in one step, as packed rows and one per row: the same gradient."""
    made = bench(train={"tokens_per_step": 64 * 200, "max_steps": 1, "micro_batch": 50})
    packed, padded = made.loop(packs=True, folder="p"), made.loop(packs=False, folder="q")
    documents = [sorted(int(i) for pack in loop.plan.epoch(0) for i in pack) for loop in (packed, padded)]
    assert documents[0] == documents[1]
    sums = []
    for loop in (packed, padded):
        loop.loss.zero_grad()
        for mine in [loop.plan.epoch(0)]:
            batch = make_batch(loop.train, mine, loop.pad)
            (loop.loss(batch.ids, batch.positions, batch.places, batch.targets) / len(batch.targets)).backward()
        sums.append([weight.grad.clone() for _, weight in loop.built.trainable()])
    assert all(torch.allclose(left, right, atol=1e-6) for left, right in zip(*sums, strict=True))


def test_a_store_that_is_full_costs_no_training(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = bench(train={"max_steps": 9, "checkpoint_every": 4}).loop()
    write = loop.checkpoints.write

    def full(step: int, name: str, data: bytes) -> Any:
        if step == 8 and name == "rank-0.safetensors":
            raise OSError(28, "No space left on device")
        return write(step, name, data)

    monkeypatch.setattr(loop.checkpoints, "write", full)
    trained(loop)
    assert [seal.step for seal in loop.checkpoints.seals()] == [4, 9]
    assert any("No space left" in line for line in made_lines(loop))


def made_lines(loop: Loop) -> list[str]:
    return loop.checkpoints.say.__self__  # type: ignore[attr-defined,no-any-return]


def test_bf16_keeps_fp32_weights_and_learns(bench: Any) -> None:
    loop = trained(bench(train={"precision": "bf16", "max_steps": 6}).loop())
    assert {weight.dtype for weight in weights(loop).values()} == {torch.float32}
    assert (loop.progress.loss_last or 9) < (loop.progress.loss_first or 0)


class Held:
    """Holds the writes of one step's checkpoint until they are let go."""

    def __init__(self, loop: Loop, step: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        write = loop.checkpoints.write

        def held(at: int, name: str, data: bytes) -> Any:
            if at == step:
                self.begun.set()
                assert self.go.wait(20)
            return write(at, name, data)

        loop.checkpoints.write = held  # type: ignore[method-assign]


def at_step(loop: Loop, step: int, act: Callable[[], object]) -> None:
    """Have something happen at the beginning of a step (counted from 0)."""
    run = loop._step

    def watched() -> bool:
        if loop.progress.step == step:
            act()
        return run()

    loop._step = watched  # type: ignore[method-assign]


def test_training_goes_on_while_a_checkpoint_is_written(bench: Any) -> None:
    loop = bench(train={"max_steps": 7, "checkpoint_every": 4}).loop()
    held = Held(loop, 4)
    at_step(loop, 6, held.go.set)  # two steps later; the loop would never come here if it waited
    trained(loop)
    assert held.begun.is_set()
    assert [seal.step for seal in loop.checkpoints.seals()] == [4, 7]


def test_one_save_at_a_time(bench: Any) -> None:
    """The second waits for the first, and both are checkpoints in the end."""
    loop = bench(train={"max_steps": 4, "checkpoint_every": 2}).loop()
    held = Held(loop, 2)
    loop.start()
    wait, in_flight = loop.saving.saver.wait, []

    def watched(*limit: Any) -> Any:
        in_flight.append(loop.saving.saver.step)
        if loop.saving.saver.step == 2:
            assert held.begun.wait(20)
            held.go.set()
        return wait(*limit)

    loop.saving.saver.wait = watched  # type: ignore[method-assign]
    loop.run()
    assert in_flight == [None, 2, 4]
    assert [seal.step for seal in loop.checkpoints.seals()] == [2, 4]


def test_a_stop_during_a_save_makes_no_second_one(bench: Any) -> None:
    loop = bench(train={"max_steps": 12, "checkpoint_every": 4}).loop()
    loop.start()
    begin = loop.saving.saver.begin

    def asked(*values: Any) -> None:
        loop.stop.since = time.monotonic()
        begin(*values)

    loop.saving.saver.begin = asked  # type: ignore[method-assign]
    with pytest.raises(PreemptedError, match="step 4"):
        loop.run()
    assert [seal.step for seal in loop.checkpoints.seals()] == [4]


@pytest.mark.parametrize(("seconds", "step"), [(0.1, 6), (1000.0, 4)])
def test_a_stop_after_a_save_makes_another_if_there_is_time(bench: Any, seconds: float, step: int) -> None:
    """How long a save takes was measured; one that cannot end within the grace is not begun."""
    loop = bench(train={"max_steps": 12, "checkpoint_every": 4}).loop()

    def ask() -> None:
        loop.stop.since = time.monotonic()
        loop.saving.collect(loop.saving.saver.wait())
        loop.saving.saver.slowest = seconds

    at_step(loop, 5, ask)
    loop.start()
    with pytest.raises(PreemptedError, match=f"step.{step}"):
        loop.run()
    assert loop.checkpoints.seals()[-1].step == step


def test_a_store_that_hangs_does_not_outlast_the_grace(bench: Any) -> None:
    loop = bench(train={"max_steps": 12, "checkpoint_every": 4}, compute={"grace_seconds": 5}).loop()
    held = Held(loop, 8)

    def ask() -> None:
        loop.saving.collect(loop.saving.saver.poll())
        loop.stop.since = time.monotonic() - 1.0

    at_step(loop, 9, ask)
    loop.start()
    with pytest.raises(PreemptedError, match="step-4"):
        loop.run()
    assert time.monotonic() - loop.stop.since < 5  # type: ignore[operator]
    held.go.set()
    loop.saving.saver.wait()


def test_the_best_checkpoint_stays_beside_the_newest(bench: Any) -> None:
    more = {"max_steps": 8, "checkpoint_every": 2, "eval_every": 2, "keep_checkpoints": 1, "keep_best": 1}
    loop = bench(train=more).loop()
    evaluate, losses = loop.evaluate, {2: 1.0, 4: 0.5, 6: 2.0, 8: 3.0}

    def fixed(when: str) -> Any:
        found = evaluate(when)
        if loop.progress.step in losses:
            loop.progress.evaluations[-1]["eval/loss"] = losses[loop.progress.step]
        return found

    loop.evaluate = fixed  # type: ignore[method-assign]
    trained(loop)
    assert [(seal.step, seal.eval_loss) for seal in loop.checkpoints.seals()] == [(4, 0.5), (8, 3.0)]
