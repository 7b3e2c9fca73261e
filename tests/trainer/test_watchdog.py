"""A rank that hangs: it is found, named, shown with its stack, and the run ends soon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import ExitCode
from trainer.launch import keep_evidence
from trainer.node.heart import Beat, Bounds, Heart, bounds_from_env, read_beat
from trainer.node.watchdog import Patience, Standing, Watchdog, blame

from .faults import fault
from .test_launch import ONE, finish, gone, kept, ranks_of, read, termination
from .toy import Toy

SOON = {"DROPFORGE_HANG_SECONDS": "4"}


def beat(rank: int = 0, **facts: Any) -> Beat:
    return Beat(
        **{"rank": rank, "pulse": 1, "mark": 1, "limit": 10.0, "phase": "step 3", "place": "x", "entered": 7} | facts
    )


def standing(rank: int, silent: bool = False, **facts: Any) -> Standing:
    return Standing(beat(rank, **facts), 11.0, silent)


def test_a_step_may_take_twenty_times_the_median_and_never_less_than_the_least() -> None:
    bounds = Bounds(120)
    assert bounds.step(deque()) == 600  # the first one compiles
    assert bounds.step(deque([0.1, 0.1, 50.0])) == 120
    assert bounds.step(deque([10.0, 10.0, 500.0])) == 200
    assert bounds_from_env({"DROPFORGE_HANG_SECONDS": "30"}).start == 150
    # The first pass of 70B in fp32 over a slow network, and of a model that is compiled.
    large = bounds_from_env({}).of(280 * 10**9, compiles=False)
    assert (large.start, large.step(deque([1.0]))) == (600 + 560, 120)
    assert bounds_from_env({}).of(0, compiles=True).start == 1200


def test_time_counts_from_the_last_mark_and_only_where_there_is_a_limit() -> None:
    patience = Patience()
    assert not patience.look([beat()], 1)[0].overdue()
    for number in range(6):
        [one] = patience.look([beat(pulse=number)], 2)
    assert (one.waited, one.overdue(), one.silent) == (12, True, False)
    [one] = patience.look([beat(mark=2, pulse=9)], 2)
    assert (one.waited, one.overdue()) == (0, False)
    for number in range(60):
        [one] = patience.look([beat(mark=3, pulse=number, limit=None)], 2)
    assert not one.overdue()


def test_a_rank_that_has_ended_is_no_rank_that_hangs(tmp_path: Path) -> None:
    """Rank 0 sends its last metrics to a server that is away, and rank 1 is done; its last sign was one of a step."""
    heart = Heart(1)
    heart.step(49)
    heart.start(tmp_path)
    while (sign := read_beat(tmp_path, 1)) is None:
        pass
    assert sign.phase == "step 49"
    heart.end()
    assert read_beat(tmp_path, 1) is None
    Heart().end()  # one that was never started

    patience = Patience()
    patience.look([beat(0), beat(1)], 1)
    for number in range(20):
        standings = patience.look([beat(0, pulse=number, limit=None)], 1)
    assert [one.beat.rank for one in standings] == [0]
    assert not any(one.overdue() or one.silent for one in standings)


def test_a_rank_that_goes_on_or_ends_while_it_is_looked_at_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.node.watchdog.EVERY", 0.001)
    killed: list[int] = []
    dog = Watchdog(
        tmp_path, range(2), 2, signal_stacks=lambda: None, kill=lambda: killed.append(1), tell=lambda *_: None
    )
    late, fine = standing(0), Standing(beat(pulse=2), 0.0, False)
    looks = [[late], [fine], [late], []]
    seen = threading.Event()

    def look() -> list[Standing]:
        if not looks:
            seen.set()
            return []
        return looks.pop(0)

    monkeypatch.setattr(dog, "_look", look)
    dog.start()
    assert seen.wait(20)
    assert dog.close() is None
    assert not killed


def test_a_node_that_was_frozen_as_a_whole_blames_nobody() -> None:
    patience = Patience()
    patience.look([beat()], 1)
    [one] = patience.look([beat()], 3600)
    assert not one.overdue()
    assert not one.silent


@pytest.mark.parametrize(
    ("standings", "rank", "words"),
    [
        ([standing(0), standing(1, silent=True)], 1, "its process does not run"),
        ([standing(0, entered=8), standing(1)], 1, "did not come to collective 8, where rank 0 waits"),
        ([standing(0, entered=8), standing(1), standing(2)], 1, "(as do 1 more)"),
        ([standing(0), standing(1)], None, "all 2 ranks hang in step 3"),
        ([standing(0, entered=None), standing(1)], None, "none is behind"),
        ([standing(0, entered=None)], 0, "rank 0 hangs in step 3, x"),
    ],
)
def test_the_rank_that_stays_behind_is_blamed(standings: list[Standing], rank: int | None, words: str) -> None:
    found = blame(standings)
    assert found[0] == rank
    assert words in found[1]


def test_a_look_at_the_stop_signal_is_a_sign_of_life() -> None:
    looks = [0]
    heart = Heart(0, Bounds(1), lambda: looks[0])
    heart.evaluation(4)
    before = heart.beat(1)
    looks[0] += 1
    after = heart.beat(2)
    assert (before.limit, after.limit) == (5, 5)
    assert after.mark > before.mark
    heart.rest()
    assert heart.beat(3).limit is None


class Store(dict[str, bytes]):
    """What all nodes share; a client of it is itself."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def dog(folder: Path, ranks: range, world: int, store: Store | None = None) -> Watchdog:
    shared = None if store is None else lambda: store
    return Watchdog(
        folder, ranks, world, signal_stacks=lambda: None, kill=lambda: None, tell=lambda *_: None, store=shared
    )


def waits(rank: int, waited: float) -> Standing:
    """Waits in collective 8."""
    return Standing(beat(rank, entered=8), waited, False)


@pytest.mark.parametrize("nodes", [1, 2])
def test_who_waits_for_a_rank_that_may_take_any_time_has_longer(tmp_path: Path, nodes: int) -> None:
    """Rank 0 deletes checkpoints of a slow store, and the others wait in the next step: nobody hangs."""
    rests = Standing(beat(0, limit=None), 11.0, False)
    store = Store()
    first, second = dog(tmp_path, range(1), 2, store), dog(tmp_path, range(1, 2), 2, store)

    def overdue(before: Standing, waited: float) -> bool:
        if nodes == 1:
            return dog(tmp_path, range(2), 2)._overdue([before, waits(1, waited)])
        first._tell_awaited([before])
        return second._overdue([waits(1, waited)])

    assert not overdue(rests, 49.0)
    assert overdue(rests, 51.0)
    assert overdue(replace(rests, beat=beat(0, limit=10.0)), 11.0)  # it went on into a step, and hangs there
    assert overdue(replace(rests, beat=beat(0, limit=None, entered=8)), 11.0)  # nobody waits for it
    assert overdue(replace(rests, silent=True), 11.0)  # its process does not run


def test_a_broken_sign_of_life_is_none(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 0) is None
    (tmp_path / "beat-0").write_text("{")
    assert read_beat(tmp_path, 0) is None


def test_a_store_that_is_away_keeps_no_evidence_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "stacks-0.txt").write_text("File")
    (tmp_path / "stacks-1.txt").touch()
    root = tmp_path / "run"
    assert keep_evidence(tmp_path, str(root), "failures/p/", lambda: 60) == f"{root}/failures/p/"
    assert [path.name for path in (root / "failures" / "p").iterdir()] == ["stacks-0.txt"]
    (tmp_path / "file").touch()
    assert keep_evidence(tmp_path, f"{tmp_path}/file", "failures/p/", lambda: 60) == ""


def evidence(toy: Toy, name: str) -> dict[str, bytes]:
    store = toy.files(name)
    return {item.key.rpartition("/")[2]: store.get(item.key) for item in store.list("failures/")}


@pytest.mark.dist
def test_a_stopped_rank_is_named(toy: Toy, start: Any, tmp_path: Path) -> None:
    process = start(toy.run("stopped", train={"max_steps": 4000, "checkpoint_every": 500}), 2, **ONE, **SOON)
    read(process, r'^@progress {"step": 10, ')
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    text = finish(process, ExitCode.HARDWARE)
    assert time.monotonic() - began < 30
    message = termination(tmp_path)
    assert (message["exit_code"], message["rank"]) == (21, 1), text
    assert "rank 1 hangs: its process does not run" in message["message"]
    assert "failures/" in message["message"]
    # The rank that waits shows where: in Python, and in the record of its collectives.
    assert "[rank 0] hang: step " in text
    assert "[rank 1] hang: no stack" in text
    assert any("step.py" in line for line in kept(toy, "stopped") if line.startswith("[rank 0]   File"))
    found = evidence(toy, "stopped")
    assert b"step.py" in found["stacks-0.txt"]
    assert json.loads(found["flight-gloo-0.json"])["entries"]
    assert [item["silent"] for item in json.loads(found["hang.json"])["ranks"]] == [False, True]
    assert all(gone(pid) for pid in ranks)


@pytest.mark.dist
def test_a_rank_that_sleeps_in_its_step_is_named(toy: Toy, start: Any, tmp_path: Path) -> None:
    code = """
take = Step.take
def sleepy(self, index, *arguments):
    if index == 3 and self.gang.rank == 0:
        fall_asleep()
    return take(self, index, *arguments)
def fall_asleep():
    time.sleep(300)
Step.take = sleepy
"""
    process = start(toy.run("sleeps"), 2, **ONE, **SOON, **fault(tmp_path, "trainer.loop.step", code))
    text = finish(process, ExitCode.HARDWARE)
    message = termination(tmp_path)
    assert (message["exit_code"], message["rank"], message["step"]) == (21, 0, 3), text
    assert "rank 0 hangs in step 4, in trainer/loop/loop.py" in message["message"]
    assert re.search(r"where rank 1 waits, (all_reduce )?in trainer/", message["message"]), message["message"]
    assert "fall_asleep" in evidence(toy, "sleeps")["stacks-0.txt"].decode()
    assert "fall_asleep" in text


@pytest.mark.dist
@pytest.mark.exact
def test_a_rank_on_another_node_is_named_by_both_nodes(toy: Toy, start: Any, tmp_path: Path) -> None:
    """A rank sleeps in an evaluation on the second node; both pods end with the same word, and keep their stacks."""
    code = """
make = make_batch
def make_batch(*arguments):
    if os.environ["RANK"] == "1":
        time.sleep(300)
    return make(*arguments)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    uri = toy.run("nodes")
    more = {"OMP_NUM_THREADS": "1", "DROPFORGE_HANG_SECONDS": "2", "PET_NNODES": "2", "PET_MASTER_PORT": port}
    more |= fault(tmp_path, "trainer.measure", code)
    words = [tmp_path / f"termination-{node}.json" for node in range(2)]
    pods = [
        start(uri, 1, PET_NODE_RANK=str(node), POD_NAME=f"pod-{node}", TERMINATION_LOG=str(words[node]), **more)
        for node in range(2)
    ]
    for pod in pods:
        finish(pod, ExitCode.HARDWARE)
    for node in range(2):
        message = json.loads(words[node].read_text())
        assert message["rank"] == 1
        assert "rank 1 hangs in the evaluation at step 0" in message["message"]
        assert f"failures/pod-{node}/" in message["message"]
    assert len(evidence(toy, "nodes")) >= 3
