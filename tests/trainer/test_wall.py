"""Where the time of a run went: phases of all attempts add up to the wall time, and what a restart costs is in them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dropforge.store import open_store
from trainer.gang import Gang
from trainer.launch import leave_began
from trainer.rank import run
from trainer.report.console import Console
from trainer.report.final import attempts_of, begin_attempt, first_began, wall_rows
from trainer.report.wall import PHASES, Wall, began_from_env
from trainer.state.stop import PreemptedError, StopSignal

from .toy import Toy


class Clock:
    """A clock for a person and a stopwatch; only `tick` moves them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_each_second_belongs_to_one_phase() -> None:
    clock = Clock()
    wall = Wall(began=990.0, now=clock, clock=clock)
    clock.tick(2)
    with wall.during("data"):
        clock.tick(5)
        with wall.during("save"):
            clock.tick(1)
    clock.tick(3)
    wall.enter("train")
    clock.tick(4)
    wall.move("train", "data", 1.5)
    found = wall.totals()
    assert found == {"load": 15, "data": 6.5, "train": 2.5, "evaluation": 0, "save": 1, "export": 0, "restarts": 0}
    assert sum(found.values()) == clock.now - 990


def test_a_phase_that_fails_has_its_seconds_too() -> None:
    clock = Clock()
    wall = Wall(now=clock, clock=clock)
    with suppress(KeyError), wall.during("evaluation"):
        clock.tick(7)
        raise KeyError
    clock.tick(1)
    assert (wall.totals()["evaluation"], wall.totals()["load"]) == (7, 1)


def test_what_no_checkpoint_knows_is_lost_to_restarts() -> None:
    clock = Clock()
    first = Wall(now=clock, clock=clock)
    first.enter("train")
    clock.tick(60)
    kept, copied = first.totals(), first.now()
    clock.tick(25)  # steps that are lost, then nothing until the next launcher starts
    second = Wall(began=clock.now, now=clock, clock=clock)
    second.resume(kept, copied)
    clock.tick(5)
    found = second.totals()
    assert (found["train"], found["restarts"], found["load"]) == (60, 25, 5)
    assert sum(found.values()) == clock.now - first.began


def test_a_clock_that_was_set_back_makes_no_time_negative() -> None:
    clock = Clock(500.0)
    wall = Wall(began=600.0, now=clock, clock=clock)
    wall.resume({}, 700.0)
    assert set(wall.totals().values()) == {0.0}


@pytest.mark.parametrize("env", [{}, {"DROPFORGE_BEGAN": ""}, {"DROPFORGE_BEGAN": "noon"}])
def test_without_a_launcher_the_rank_counts_from_its_own_start(env: dict[str, str]) -> None:
    assert began_from_env(env) is None


def test_phases_of_a_real_run_add_up_to_its_wall_time_over_a_restart(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[float] = []

    def rows(wall: Wall, first: float | None) -> dict[str, float]:
        reported.append(time.time())
        return wall_rows(wall, first)

    monkeypatch.setattr("trainer.report.teller.wall_rows", rows)
    uri = toy.run(train={"max_steps": 8, "checkpoint_every": 4, "eval_every": 4})
    began = time.time()
    stop, console = StopSignal(), Console(quiet=True)

    def hear(step: int, **facts: object) -> None:
        if step == 6:
            stop.since = time.monotonic()

    console.progress = hear  # type: ignore[method-assign,assignment]
    with pytest.raises(PreemptedError):
        run(uri, stop, console)
    time.sleep(1.0)  # nobody runs: the time that a gang waits for its place
    run(uri, StopSignal(), Console(quiet=True))
    took = reported[-1] - began  # what the report does not know is its own writing
    report = json.loads(toy.files().get("report.json"))
    wall = report["wall"]
    assert wall["seconds"] == pytest.approx(took, abs=0.5)
    assert sum(wall[phase] for phase in PHASES) == pytest.approx(wall["seconds"], rel=0.01)
    assert all(wall[phase] > 0 for phase in PHASES)
    assert wall["restarts"] >= 1.0
    assert wall["train"] + wall["data"] >= report["seconds"]
    assert report["attempts"][0]["began"] == pytest.approx(began, abs=1)


def test_a_gang_that_ends_before_its_attempt_has_a_number_is_no_queue(tmp_path: Path) -> None:
    """The first gang tokenises for 40 minutes and dies: that time is the run's, not that before its first pod."""
    store = open_store(str(tmp_path))
    leave_began(store, 1000.0)
    leave_began(store, 3400.0)  # the second gang
    assert begin_attempt(store, Gang(), None, 3400.0) == 1
    assert first_began(store) == 1000.0
    clock = Clock(3460.0)
    assert wall_rows(Wall(3400.0, now=clock, clock=clock), first_began(store))["seconds"] == 2460.0


def test_a_run_of_an_older_version_began_with_its_first_attempt(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    begin_attempt(store, Gang(), None, 3400.0)
    assert first_began(store) == 3400.0


@pytest.mark.parametrize(
    "torn", [b"", b"{}", b"[]", b'{"attempt": null, "began": {}}', b'{"attempt": 7, "began": "x"}', b'{"began": NaN}']
)
def test_an_attempt_that_cannot_be_read_ends_no_run(tmp_path: Path, torn: bytes) -> None:
    store = open_store(str(tmp_path))
    begin_attempt(store, Gang(), None, 3400.0)
    begin_attempt(store, Gang(), 2, 3500.0)
    store.put("attempts/1.json", torn)
    store.put("attempts/x.json", b"{}")
    assert [found["attempt"] for found in attempts_of(store)] == [1, 2]
    assert first_began(store) is None
    assert attempts_of(store)[1]["resumed_from"] == 2


def test_what_a_gang_without_an_attempt_took_is_lost_to_restarts(toy: Toy) -> None:
    uri = toy.run("early", train={"max_steps": 2})
    leave_began(toy.files("early"), time.time() - 600)
    run(uri, StopSignal(), Console(quiet=True))
    wall = json.loads(toy.files("early").get("report.json"))["wall"]
    assert wall["restarts"] == pytest.approx(600, abs=1)
    assert sum(wall[phase] for phase in PHASES) == pytest.approx(wall["seconds"], abs=1)
