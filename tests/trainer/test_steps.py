"""What a log step tells: one JSON line with everything, the same in MLflow, without waiting for a device in between."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.gang import Gang
from trainer.interval import Due, Interval
from trainer.loop.progress import Progress
from trainer.loop.step import StepResult
from trainer.report.console import Console
from trainer.report.flops import Flops, Gauge
from trainer.report.forecast import seconds_left, times_left
from trainer.report.steps import StepLog, Window
from trainer.report.tracking import Tracker

from .ranks import Ranks
from .ranks_loop import Stage, make_loop, make_stage
from .toy import Toy
from .waits import reads_of_steps

RESULT = StepResult(
    step=1, nats=20.0, targets=10, tokens=40, rate=1e-3, norm=0.5, own_nats=20.0, seconds=2.0, data_seconds=0.5,
    wait_seconds=0.25, exchange_seconds=0.125, busy=(1.0, 3.0), stopping=False, due=Due(), suspects=(),
)  # fmt: skip


class Heard(Tracker):
    def __init__(self) -> None:
        super().__init__(None, print)
        self.told: list[tuple[dict[str, float], int]] = []

    def metrics(self, values: Any, step: int) -> None:
        self.told.append((dict(values), step))


def log(gauge: Gauge, results: list[StepResult], last: bool = True) -> tuple[list[str], list[dict[str, Any]], Heard]:
    """Some steps of which the last is logged: lines for people, lines for the job library, MLflow's."""
    said: list[str] = []
    console, tracker, progress = Console(steps=100), Heard(), Progress()
    console.say = said.append  # type: ignore[method-assign]
    steps = StepLog(console, tracker, 100, gauge, lambda: 3725.0)
    for number, result in enumerate(results, 1):
        progress.count(replace(result, step=number), ["a"])
        steps.after_step(replace(result, step=number), progress, last and number == len(results))
    lines = [json.loads(line.removeprefix("@progress ")) for line in said if line.startswith("@progress ")]
    return [line for line in said if not line.startswith("@")], lines, tracker


def test_one_line_tells_means_over_the_steps_since_the_last_one() -> None:
    gauge = Gauge(Flops(token=3.0, target=2.0), peak=100.0, devices=2)
    slower = replace(RESULT, seconds=4.0, busy=(2.0, 4.5), exchange_seconds=0.375, wait_seconds=0.75)
    people, [line], tracker = log(gauge, [RESULT, slower])
    memory = {key: line.pop(key) for key in list(line) if "megabytes" in key}
    assert set(memory) == {"peak_rss_megabytes"}
    assert 10 < memory["peak_rss_megabytes"] < 1e6
    assert line == {
        "step": 2, "steps": 100, "loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-3, "eta_seconds": 3725.0,
        "tokens_per_second": 13.3, "tokens_per_second_per_device": 6.7, "step_seconds": 3.0, "data_wait_seconds": 0.5,
        "mfu": round((80 * 3 + 20 * 2) / 6 / 200, 4), "collective_wait_seconds": 0.5, "gradient_wait_seconds": 0.25,
        "rank_spread": 2.5, "slowest_rank": 1,
    }  # fmt: skip
    [(metrics, step)] = tracker.told
    assert step == 2
    assert metrics == {
        f"train/{key}": value for key, value in (line | memory).items() if key not in ("step", "steps")
    } | {"train/tokens": 80.0}
    assert "rank 1 takes 2.5 times the fastest" in people[0]
    assert "eta 1:02:05" in people[0]
    assert "mfu 23.3%" in people[0]


def test_what_is_not_known_is_left_out_and_nothing_is_invented() -> None:
    alone = replace(RESULT, busy=(1.0,), exchange_seconds=0.0)
    people, [line], _ = log(Gauge(Flops(1.0), None, 1), [alone])
    absent = {"mfu", "rank_spread", "slowest_rank", "collective_wait_seconds", "gradient_wait_seconds"}
    assert not absent & set(line)
    assert "mfu" not in people[0]
    assert "rank" not in people[0]
    _, [line], _ = log(Gauge(devices=2), [replace(RESULT, busy=(), exchange_seconds=None)])
    assert not {"mfu", "rank_spread", "slowest_rank", "gradient_wait_seconds"} & set(line)
    assert line["collective_wait_seconds"] == 0.25


def test_a_step_that_is_not_finite_still_gives_a_line_of_json() -> None:
    broken = replace(RESULT, nats=None, norm=math.nan, own_nats=math.inf)
    people, [line], tracker = log(Gauge(), [broken])
    assert "loss" not in line
    assert "grad_norm" not in line
    assert "step skipped on all ranks" in people[0]
    assert ({"train/skipped": 1}, 1) in tracker.told


def test_nothing_is_told_off_log_steps() -> None:
    people, lines, tracker = log(Gauge(), [RESULT, RESULT], last=False)
    assert (people, lines, tracker.told) == ([], [], [])


def test_ranks_that_work_alike_are_not_called_slow() -> None:
    people, [line], _ = log(Gauge(devices=2), [replace(RESULT, busy=(1.0, 1.1))])
    assert line["rank_spread"] == 1.1
    assert "takes" not in people[0]
    assert Window(busy=[0.0, 1.0]).spread() is None


@pytest.mark.parametrize(
    ("interval", "step", "steps", "expected"),
    [
        (Interval(steps=10), 0, 100, 10),
        (Interval(steps=10), 5, 100, 10),
        (Interval(steps=10), 10, 100, 9),
        (Interval(steps=10), 90, 95, 1),
        (Interval(steps=10), 100, 100, 0),
        (Interval(), 5, 100, 1),
        (Interval(seconds=60.0), 5, 100, 6),
    ],
)
def test_what_comes_at_intervals_comes_once_more_after_the_last_step(
    interval: Interval, step: int, steps: int, expected: int
) -> None:
    assert times_left(interval, step, steps, 300.0) == expected


def test_the_time_left_counts_evaluations_and_saves() -> None:
    progress = Progress(step=20, seconds=40.0, evaluations=[{"step": 0}, {"step": 10}, {"step": 20}], saves=2)
    every = {"evaluation": Interval(steps=10), "checkpoint": Interval(steps=25)}
    wall = {"evaluation": 30.0, "save": 1.0}
    assert seconds_left(progress, wall, 100, **every) == 80 * 2 + 8 * 10 + 4 * 0.5
    assert seconds_left(replace(progress, step=100), wall, 100, **every) == 0
    assert seconds_left(Progress(), {}, 100, **every) == 0  # nothing is known yet, and nothing fails


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "steps", tmp_path / "scratch", train={"log_every": 4})


def test_micro_batches_wait_for_no_device(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer reads as many tensors in a step of one micro-batch as in a step of four, on log steps too."""
    found = reads_of_steps(stage, True, monkeypatch, steps=3)  # steps 2 and 3, and the log step 4
    assert found[8] == found[2]
    assert found[2][0] == found[2][1] == found[2][2]
    assert sum(found[2][0].values()) <= 3  # the loss, and the norm of the gradient


def slow_on_one(gang: Gang, stage: Stage) -> tuple[list[dict[str, Any]], int]:
    loop = make_loop(gang, stage, True)
    said: list[str] = []
    loop.console.say = said.append  # type: ignore[method-assign]
    loop.console.quiet = False
    sums, own = [0], gang.__class__.sum

    def counted(self: Gang, values: list[float]) -> list[float]:
        sums[0] += 1
        return own(self, values)

    loop.start()
    forward = loop.loss.forward

    def slow(*inputs: Any) -> Any:
        time.sleep(0.1 if gang.rank == 1 else 0.0)
        return forward(*inputs)

    loop.loss.forward = slow  # type: ignore[method-assign]
    gang.__class__.sum = counted  # type: ignore[method-assign]
    for _ in range(4):
        loop._step()
    return [json.loads(line.removeprefix("@progress ")) for line in said if line.startswith("@progress ")], sums[0]


@pytest.mark.dist
def test_the_slow_rank_is_named_in_the_one_collective_of_the_step(ranks: Ranks, stage: Stage) -> None:
    (lines, sums), (other, _) = ranks(slow_on_one, 2, stage.change(parallel="ddp"))
    assert sums == 4  # steps
    assert len(lines) == 1
    assert lines[0]["slowest_rank"] == other[0]["slowest_rank"] == 1
    assert lines[0]["rank_spread"] > 1.2  # others may have the cores: then the work beside the sleep counts too
    # Two micro-batches of 0.1 s: rank 0 waits for them in its backward pass, rank 1 for nobody.
    assert lines[0]["gradient_wait_seconds"] > other[0]["gradient_wait_seconds"]
    assert lines[0]["tokens_per_second_per_device"] == pytest.approx(lines[0]["tokens_per_second"] / 2, abs=0.1)


@pytest.mark.dist
def test_sharded_ranks_tell_no_times_that_nobody_measures(ranks: Ranks, stage: Stage) -> None:
    (lines, _), _ = ranks(slow_on_one, 2, stage.change(parallel="fsdp"))
    assert not {"gradient_wait_seconds", "rank_spread", "slowest_rank"} & set(lines[0])
    assert "collective_wait_seconds" in lines[0]
