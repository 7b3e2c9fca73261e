"""When a training logs, evaluates, saves and ends, and which weights it leaves."""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError, RecipeError
from dropforge.store import FolderStore
from trainer.config import EarlyStopping
from trainer.gang import Gang
from trainer.interval import Due, Interval, Timers
from trainer.loop.batching import Batching, solve
from trainer.loop.best import BestWeights, best_step, stalled
from trainer.loop.divergence import DivergedError
from trainer.loop.limits import first_batches
from trainer.loop.step import Tally
from trainer.measure import measure
from trainer.state.checkpoint import Seal, StorageError
from trainer.state.saver import Saved
from trainer.state.stop import PreemptedError

from .test_loop import Bench, poison, trained, weights
from .toy import Toy


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Any:
    return lambda **overrides: Bench(toy, tmp_path / "scratch", **overrides)


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"step": 10 * index, "eval/loss": value} for index, value in enumerate(values)]


def test_the_best_is_the_first_of_the_lowest_after_training_began() -> None:
    assert best_step(losses(0.1, 3.0, 2.0, 2.0, 2.5)) == 20
    assert best_step(losses(0.1, math.nan, 5.0)) == 20
    assert best_step(losses(0.1)) is None


def test_training_stalls_after_patience_evaluations_without_enough_gain() -> None:
    rule = EarlyStopping(patience=2, min_delta=0.5)
    assert not stalled(losses(0.1, 3.0, 2.8), rule)
    assert stalled(losses(0.1, 3.0, 2.8, 2.6), rule)
    assert not stalled(losses(0.1, 3.0, 2.8, 2.4), rule)
    assert stalled(losses(0.1, 3.0, math.nan, math.nan), rule)
    assert not stalled(losses(9.0, 9.0, 9.0, 9.0), None)


def test_intervals_are_steps_or_minutes() -> None:
    assert Interval.parse(4).due(8)
    assert not Interval.parse(4).due(6)
    assert not Interval.parse(0).due(4)
    assert Interval.parse("10 min") == Interval.parse("10min") == Interval(seconds=600.0)
    for wrong in ("ten", "0 min", "5", "-1 min", -1):
        with pytest.raises(ValueError, match=r"neither|negative"):
            Interval.parse(wrong)
    now = [0.0]
    timers = Timers({"evaluation": Interval.parse("1 min"), "log": Interval.parse(1)}, lambda: now[0])
    now[0] = 59.0
    assert timers.due() == Due()
    now[0] = 61.0
    assert timers.due() == Due(evaluation=True)
    timers.restart("evaluation")
    assert timers.due() == Due()


def test_the_clock_of_rank_0_decides_for_all_by_name() -> None:
    """Two ranks whose clocks disagree get the same sums, each under its own name."""
    none = {"broken": 0, "log": 0, "checkpoint": 0, "fast": 0}
    mine = Tally(loss=1.0, targets=2, tokens=3, stop=0, evaluation=1, busy=(2.0, 0.0), **none)
    other = Tally(loss=0.5, targets=4, tokens=5, stop=1, evaluation=0, busy=(0.0, 3.0), **none)

    class Pair(Gang):
        def sum(self, values: list[float]) -> list[float]:
            return [a + b for a, b in zip(values, [*list(vars(other).values())[:-1], *other.busy], strict=True)]

    assert mine.summed(Pair()) == Tally(1.5, 6, 8, 1, 0, 0, 1, 0, 0, busy=(2.0, 3.0))


def test_a_global_batch_is_spread_evenly() -> None:
    assert solve(16, 2, 3) == Batching(16, 2, 3, 3)
    assert solve(8, 3, 2) == Batching(8, 3, 2, 2)
    assert solve(10, 2, 4) == Batching(10, 2, 2, 3)
    with pytest.raises(RecipeError, match="leaves 1 of 3 ranks idle"):
        solve(2, 3, 1)


def test_minutes_choose_the_step_and_leave_the_data_alone(bench: Any) -> None:
    train = {"max_steps": 8, "eval_every": "1 min", "checkpoint_every": "2 min", "log_every": "1 min"}
    made = bench(train=train)
    loop, plain = made.loop(folder="timed"), made.loop(folder="plain")
    now = [0.0]
    loop.timers = Timers(loop.every, lambda: now[0])
    observed = []

    class Watch:
        def after_step(self, result: Any, progress: Any, log: bool) -> None:
            observed.append((result.step, log))
            now[0] += 40.0  # a step takes 40 seconds by this clock

    loop.observers.append(Watch())
    trained(loop)
    trained(plain)
    assert [item["step"] for item in loop.progress.evaluations] == [0, 3, 6, 8]
    assert [step for step, log in observed if log] == [3, 6, 8]
    assert [seal.step for seal in loop.checkpoints.seals()] == [4, 8]
    assert [item["step"] for item in plain.progress.evaluations] == [0, 8]
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(loop).items())


STALLING = {
    "max_steps": 12,
    "eval_every": 2,
    "checkpoint_every": 2,
    "early_stopping": {"patience": 2},
    "export": "best",
}


def scripted(loop: Any, values: dict[int, float]) -> Any:
    """Have evaluations find given losses, by step."""
    gather = loop.gang.gather

    class Scripted(Gang):
        def gather(self, value: Any) -> list[Any]:
            if isinstance(value, dict) and "eval/loss" in value:
                value = {**value, "eval/loss": values[loop.progress.step]}
            return gather(value)

    loop.gang = Scripted()
    return loop


COURSE = {0: 9.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 1.0, 12: 1.0}


def test_training_ends_early_and_leaves_its_best_weights_also_when_it_was_stopped(bench: Any) -> None:
    made = bench(train=STALLING)
    whole = scripted(made.loop(folder="whole"), COURSE)
    kept: dict[int, Any] = {}
    keep = whole.best.keep

    def noting(step: int, found: Any) -> None:
        kept[step] = {name: weight.detach().clone() for name, weight in found.items()}
        keep(step, found)

    whole.best.keep = noting
    trained(whole)
    report = whole.report()
    assert (report["steps"], report["exported_step"]) == (8, 4)
    assert report["ended"].startswith("early")
    assert report["eval"]["after"]["eval/loss"] == 3.0
    assert sorted(kept) == [2, 4]
    assert all(torch.equal(weight, kept[4][name]) for name, weight in weights(whole).items())
    json.dumps(report, allow_nan=False)

    first = scripted(made.loop(folder="parts"), COURSE)
    step = first._step

    def stop_at_six() -> bool:
        if first.progress.step == 5:
            first.stop.since = 1e18
        return bool(step())

    first._step = stop_at_six
    with pytest.raises(PreemptedError, match="step 6"):
        trained(first)
    second = scripted(made.loop(folder="parts"), COURSE)
    second.resume()
    trained(second)
    assert second.report()["exported_step"] == 4
    assert all(torch.equal(weight, kept[4][name]) for name, weight in weights(second).items())
    # Once it has ended, it stays ended.
    third = scripted(made.loop(folder="parts"), COURSE)
    third.resume()
    trained(third)
    assert third.progress.step == 8
    assert [item.key for item in third.best.store.list("best/")] != []
    for item in list(third.best.store.list("best/")):
        third.best.store.put(item.key, b"broken")
    with pytest.raises(DropforgeError, match="gone, or their bytes"):
        third.best.read(4)


def test_a_store_that_is_away_when_old_best_weights_go_ends_no_training(bench: Any) -> None:
    made = bench(train=STALLING)
    loop = scripted(made.loop(), COURSE)
    seals, listed = loop.checkpoints.seals, loop.best.store.sizes

    def elsewhere() -> Any:
        """The thread that saves can be lucky where the training is not."""
        if threading.current_thread() is threading.main_thread():
            raise StorageError("checkpoints cannot be read now")
        return seals()

    def away(prefix: str) -> Any:
        if prefix == "best/":
            raise OSError(5, "Input/output error")
        return listed(prefix)

    loop.checkpoints.seals, loop.best.store.sizes = elsewhere, away
    trained(loop)
    assert loop.report()["exported_step"] == 4
    assert any("older best weights" in line and "Input/output" in line for line in made.said)


def test_best_weights_stay_while_a_checkpoint_takes_them_for_the_best(bench: Any) -> None:
    """One that is being written may be what a resume goes on from, and is not among those that exist."""
    made = bench(train={**STALLING, "keep_checkpoints": 1})
    loop = scripted(made.loop(), COURSE)
    loop.start()
    loop.progress.evaluations = losses(9.0, 5.0, 3.0, 1.0)  # at steps 0, 10, 20 and 30
    loop.progress.step = 30
    for step in (10, 20, 30):
        loop.best.keep(step, weights(loop))
    loop.saving.saver.start(20, lambda: Saved(20), time.perf_counter())

    def seal(step: int) -> Seal:
        return Seal("bench", step, 1, "", {}, {}, "")

    def there() -> set[str]:
        return {item.key.split("-")[1] for item in loop.best.store.list("best/")}

    loop.saving.collect(Saved(10, seal=seal(10), seals=[seal(10)]))
    assert there() == {"10", "20", "30"}
    loop.saving.saver.wait()
    loop.saving.collect(Saved(30, seal=seal(30), seals=[seal(30)]))
    assert there() == {"30"}


def test_a_budget_ends_a_run_whose_bad_steps_never_stand_in_a_row(bench: Any) -> None:
    loop = bench(train={"max_skipped_steps": 2}).loop()
    poison(loop, {1, 3, 5})
    loop.start()
    with pytest.raises(DivergedError, match=r"in 3 steps, and `train\.max_skipped_steps` is 2"):
        loop.run()
    assert [item["step"] for item in loop.progress.skips] == [2, 4, 6]


def test_a_skipped_step_names_the_rows_of_the_forward_pass_that_broke(bench: Any) -> None:
    made = bench(train={"max_steps": 2, "micro_batch": 2})
    loop = made.loop()
    loop.row_keys = made.prepared.row_keys
    forward, calls = loop.loss.forward, []

    def second_is_bad(*inputs: Any) -> Any:
        calls.append(1)
        return forward(*inputs) * (math.nan if len(calls) == 2 else 1.0)

    loop.loss.forward = second_is_bad
    loop.start()
    loop.loss.train()
    calls.clear()  # of the checks before the first step
    loop._step()
    from trainer.data.balance import share

    bad = share(loop.plan.step(0), loop.plan.lengths, 0, 1, 2)[1]
    rows = {int(loop.train.rows[document]) for pack in bad for document in pack}
    named = loop.progress.skips[0]
    assert set(named["rows"]) == {bytes(made.prepared.row_keys[row]).hex() for row in rows}
    assert named["count"] == len(rows)
    assert len(named["rows"][0]) == 32
    assert any(named["rows"][0] in line for line in made.said)


def test_limits_take_less_of_the_data(bench: Any) -> None:
    made = bench(
        train={"max_steps": 1, "max_rows": 40, "rows_per_step": 4, "micro_batch": 2},
        evaluate={"max_batches": 2},
        promote={"better_than_base": False},
    )
    assert made.prepared.train.facts["rows"] == 40
    loop = made.loop()
    assert loop.plan.rows == 4
    assert any("4 rows over 1 rank, 2 forward passes" in line for line in trained(loop).checkpoints.say.__self__)
    assert 0 < len(loop.eval) < len(made.prepared.eval)
    calls = []
    measure(loop.loss, loop.eval, Gang(), size=64, micro=2, pad=0, tell=lambda turn, turns: calls.append((turn, turns)))
    assert calls[-1] == (2, 2)
    whole = first_batches(made.prepared.eval, 1000, micro=2, size=64, packed=True)
    assert whole is made.prepared.eval
    assert np.array_equal(np.diff(loop.eval.offsets), loop.eval.lengths)


def test_best_weights_of_any_size_pass_through_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of S3 takes 5 GB, and no rank holds the file of a large model in its memory."""

    class Narrow(FolderStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise AssertionError(f"{key} goes through one request")

        def get(self, key: str) -> bytes:
            raise AssertionError(f"{key} is read whole")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    best = BestWeights(Narrow(tmp_path / "run"))
    weights = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    best.keep(3, weights)
    best.keep(5, {"a": torch.zeros(1)})
    found = best.read(3)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    best.prune([3])
    assert [key.split("-")[1] for key in best.store.sizes("best/")] == ["3"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing is left of the local files
    with pytest.raises(DropforgeError, match="gone, or their bytes"):
        best.read(5)


def test_without_a_rule_no_evaluation_is_looked_at() -> None:
    class Long(list[dict[str, Any]]):
        def __iter__(self) -> Any:
            raise AssertionError("all evaluations are looked at")

    assert not stalled(Long(losses(1.0, 2.0)), None)


def test_a_save_that_ends_in_a_long_evaluation_is_told_at_once(bench: Any) -> None:
    loop = bench(train={"max_steps": 2, "checkpoint_every": 1, "eval_every": 2}).loop()
    told: list[list[int]] = []
    seen: list[int] = []
    loop.offer = lambda seals: told.append([seal.step for seal in seals])
    going_on = threading.Event()
    seal, logits = loop.checkpoints.seal, loop.loss.logits

    def held(step: int, *more: Any) -> Any:
        assert step != 1 or going_on.wait(30)
        return seal(step, *more)

    def batch(*inputs: Any) -> Any:
        if loop.progress.step == 2 and not loop.loss.training:
            seen.append(len(told))
            going_on.set()
            loop.saving.saver._thread and loop.saving.saver._thread.join(30)
        return logits(*inputs)

    loop.checkpoints.seal = held
    loop.loss.logits = batch
    trained(loop)
    assert len(seen) > 2
    assert seen == [0] + [1] * (len(seen) - 1)
