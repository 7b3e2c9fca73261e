"""A window of steps under the profiler, on all ranks the same one; bad requests are said and ignored."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.errors import DropforgeError
from dropforge.layout import PROFILE_REQUEST
from dropforge.profiling import MOST, Span, read_request, request
from dropforge.store import FolderStore, Store, open_store
from trainer.gang import Gang
from trainer.report.profile import Profiler, Requests

from .ranks import Ranks
from .ranks_loop import Stage, make_loop, make_stage
from .toy import Toy


@pytest.mark.parametrize(("text", "first", "last"), [("100-103", 100, 103), ("7", 7, 7), ("2-51", 2, 51)])
def test_spans(text: str, first: int, last: int) -> None:
    assert Span.parse(text) == Span(first, last)


@pytest.mark.parametrize("text", ["", "0", "1", "1-3", "9-8", "2-52", "5-", "-5", "five", "5-6-7", "05-06"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="step"):
        Span.parse(text)


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{}", b'{"steps": 0}', b'{"steps": true}', b'{"steps": "3"}',
                                  b'{"steps": 1e9}', b"\xff"])  # fmt: skip
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON, of text, and ours
        read_request(data)
    assert read_request(request(MOST)) == MOST


def asked(store: Store) -> tuple[Requests, list[str]]:
    said: list[str] = []
    requests = Requests(store, said.append)
    requests.look()
    assert requests._thread is not None
    requests._thread.join(20)
    return requests, said


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert asked(store)[0].take() == 0
    store.put(PROFILE_REQUEST, request(3))
    requests, said = asked(store)
    assert (requests.take(), requests.take(), said) == (3, 0, [])
    assert store.stat(PROFILE_REQUEST) is None


def test_a_bad_request_is_said_and_goes_away(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(PROFILE_REQUEST, b'{"steps": 9999}')
    requests, said = asked(store)
    assert requests.take() == 0
    assert said == [f"a request for a profile is ignored: `steps` must be a number from 1 to {MOST}"]
    assert store.stat(PROFILE_REQUEST) is None


def test_a_store_that_deletes_nothing_asks_once_and_one_that_is_away_never(tmp_path: Path) -> None:
    class Stubborn(FolderStore):
        def delete(self, key: str) -> None:
            raise OSError("read only")

    store = Stubborn(tmp_path)
    store.put(PROFILE_REQUEST, request(3))
    requests, _ = asked(store)
    assert requests.take() == 3
    requests.look()
    assert requests._thread is not None
    requests._thread.join(20)
    assert requests.take() == 0

    class Away(FolderStore):
        def stat(self, key: str) -> Any:
            raise OSError("away")

    requests, said = asked(Away(tmp_path))
    assert (requests.take(), said) == (0, [])


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "profile", tmp_path / "scratch", train={"log_every": 1, "max_steps": 8})


def profiled(gang: Gang, stage: Stage, planned: str | None, wishes: list[int]) -> tuple[list[str], list[str]]:
    """Train with a profiler whose leader hears a wish before each step; what was said, and where the traces are."""
    said: list[str] = []
    told: list[str] = []
    store = open_store(stage.spec.root)
    profiler = Profiler(gang, store, said.append, planned=Span.parse(planned) if planned else None, told=told.append)
    loop = make_loop(gang, stage, True)
    loop.observers.append(profiler)
    left = iter(wishes)
    loop.asked = lambda: next(left, 0)
    loop.start()
    loop.run()
    profiler.close(loop.progress.step, 30)
    return said, told


def trace(store: Store, name: str) -> str:
    events = json.loads(gzip.decompress(store.get(name)))["traceEvents"]
    return " ".join({event["name"] for event in events})


def test_a_planned_window_is_written_and_the_end_of_the_training_cuts_it(stage: Stage) -> None:
    said, told = profiled(Gang(), stage, "3-4", [])
    store = open_store(stage.spec.root)
    assert "aten::" in trace(store, "profiles/steps-3-4/rank-0.json.gz")
    assert told == [f"{store.uri}/profiles/steps-3-4"]
    assert said == ["profiling steps 3-4", f"profile: {told[0]}"]
    said, told = profiled(Gang(), stage, "7-20", [])
    assert told == [f"{store.uri}/profiles/steps-7-8"]
    assert profiled(Gang(), stage, "9-12", []) == (["profiling steps 9-12"], [])


def test_a_wish_during_a_window_is_said_and_ignored(stage: Stage) -> None:
    said, told = profiled(Gang(), stage, None, [0, 3, 2])
    assert said[:2] == ["profiling steps 3-5", "a request for a profile is ignored: steps 3-5 are being profiled"]
    assert len(told) == 1


def test_a_profiler_that_cannot_start_ends_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("somebody else profiles")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    said, told = profiled(Gang(), stage, "3-4", [0, 0, 0, 1])
    assert told == []
    assert said == ["steps cannot be profiled (RuntimeError: somebody else profiles)"] * 2


@pytest.mark.dist
def test_a_wish_of_rank_0_is_profiled_on_both_ranks_at_the_same_steps(ranks: Ranks, stage: Stage) -> None:
    found = ranks(profiled, 2, stage, None, [0, 2])
    store = open_store(stage.spec.root)
    for rank in (0, 1):
        assert found[rank][0][0] == "profiling steps 3-4"
        assert "allreduce" in trace(store, f"profiles/steps-3-4/rank-{rank}.json.gz")


def test_the_command_asks_only_a_run_that_is_being_trained(tmp_path: Path) -> None:
    from dropforge.cli.profile import ask

    store = open_store(str(tmp_path))
    with pytest.raises(DropforgeError, match="no such run"):
        ask(store, "a", 3)
    store.put("runs/a/run.json", b"{}")
    ask(store, "a", 3)
    assert store.get("runs/a/profile.json") == request(3)
    store.put("runs/a/report.json", b"{}")
    with pytest.raises(DropforgeError, match="done"):
        ask(store, "a", 3)


def test_a_request_that_could_not_be_deleted_at_first_does_not_hide_the_next_one_like_it(tmp_path: Path) -> None:
    class Sticky(FolderStore):
        sticks = True

        def delete(self, key: str) -> None:
            if self.sticks:
                raise OSError("away")
            super().delete(key)

    def look() -> int:
        requests.look()
        assert requests._thread is not None
        requests._thread.join(20)
        return requests.take()

    store = Sticky(tmp_path)
    store.put(PROFILE_REQUEST, request(3))
    requests, _ = asked(store)
    assert (requests.take(), look()) == (3, 0)
    store.sticks = False
    store.delete(PROFILE_REQUEST)
    assert look() == 0
    store.put(PROFILE_REQUEST, request(3))
    assert look() == 3
