"""Metrics reach MLflow, a server that is away ends no training, and the run's status is never touched."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dropforge.rest import Rest
from dropforge.run import Tracking
from trainer.report import tracking
from trainer.report.tracking import make_tracker, thinned


@pytest.fixture(autouse=True)
def _no_ambient_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


class Server(ThreadingHTTPServer):
    """Takes batches as MLflow does, after failing as often as it is told to.

    `bad`: keys that it refuses. `latest`: the last step it has of each metric. It answers while `open` is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
        self.bad: set[str] = set()
        self.latest: dict[str, int] = {}
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.started = 1
        self.batches: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failed = threading.Event()

    @property
    def tracking(self) -> Tracking:
        return Tracking(f"http://127.0.0.1:{self.server_address[1]}", "abc", "0")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.set()
        self.server.open.wait(30)
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200 and self.server.bad & {row["key"] for row in body["metrics"] + body["tags"]}:
            status = 400
        if status == 200:
            self.server.batches.append({"path": self.path, **body})
            self.server.headers.append(dict(self.headers))
        else:
            self.server.failed.set()
        self.answer(status, b"{}")

    def do_GET(self) -> None:
        rows = [{"key": key, "value": 1.0, "step": step} for key, step in self.server.latest.items()]
        info = {"start_time": self.server.started} if self.server.started else {}
        self.answer(200, json.dumps({"run": {"info": info, "data": {"metrics": rows}}}).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.open.set()
    found.shutdown()
    found.server_close()


def keys(server: Server) -> list[tuple[str, int]]:
    return [(row["key"], row["step"]) for batch in server.batches for row in batch["metrics"]]


def test_metrics_and_tags_are_sent_in_batches_to_the_runs_log(server: Server) -> None:
    tracker = make_tracker(server.tracking, print)
    for step in range(1200):
        tracker.metrics({"train/loss": float(step), "broken": float("nan")}, step)
    tracker.tags({"dropforge.attempt": "1"})
    tracker.tags({"dropforge.attempt": "2"})
    assert tracker.close() == []
    assert keys(server) == [("train/loss", step) for step in range(1200)]
    assert {batch["path"] for batch in server.batches} == {"/api/2.0/mlflow/runs/log-batch"}
    assert {batch["run_id"] for batch in server.batches} == {"abc"}
    assert [tag for batch in server.batches for tag in batch["tags"]][-1] == {"key": "dropforge.attempt", "value": "2"}


def test_a_server_that_comes_back_gets_everything_in_order(server: Server) -> None:
    said: list[str] = []
    server.answers = [503, 500]
    tracker = make_tracker(server.tracking, said.append)
    tracker.metrics({"train/loss": 1.0}, 1)
    assert server.failed.wait(20)
    tracker.metrics({"train/loss": 2.0}, 2)
    assert tracker.close() == []
    assert keys(server) == [("train/loss", 1), ("train/loss", 2)]
    assert sum("away" in line for line in said) == 1
    assert said[-1] == "MLflow is back"


def test_what_was_never_taken_comes_back_to_the_caller() -> None:
    said: list[str] = []
    tracker = make_tracker(Tracking("http://127.0.0.1:1", "abc", "0"), said.append)
    tracker.metrics({"train/loss": 1.0}, 1)
    assert not tracker.flush(20)  # it has tried: the first request reads the machine's certificates
    [row] = tracker.close(seconds=0.3)
    assert (row["key"], row["step"]) == ("train/loss", 1)
    assert any("away" in line for line in said)


def test_only_the_value_that_is_refused_is_left_out(server: Server) -> None:
    said: list[str] = []
    server.bad = {"train/odd", "bad.tag"}
    tracker = make_tracker(server.tracking, said.append)
    for step in range(40):
        tracker.metrics({"train/loss": 1.0, **({"train/odd": 2.0} if step in (7, 31) else {})}, step)
    tracker.tags({"good.tag": "1", "bad.tag": "2"})
    assert tracker.close() == []
    assert keys(server) == [("train/loss", step) for step in range(40)]
    assert {tag["key"] for batch in server.batches for tag in batch["tags"]} == {"good.tag"}
    assert sorted(line.split()[2] for line in said) == ["bad.tag", "train/odd"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_not_allowed_now_is_kept_until_it_is(server: Server, status: int) -> None:
    said: list[str] = []
    server.answers = [status]
    tracker = make_tracker(server.tracking, said.append)
    tracker.metrics({"train/loss": 1.0}, 1)
    assert not tracker.flush(20)
    tracker.metrics({"train/loss": 2.0}, 2)
    assert tracker.close() == []
    assert keys(server) == [("train/loss", 1), ("train/loss", 2)]
    assert f"HTTP {status}" in said[0]
    assert said[-1] == "MLflow is back"


def test_a_run_that_takes_nothing_more_costs_no_metric(server: Server) -> None:
    """A deleted run answers every batch with 400: no value of ours is to blame."""
    server.answers = [400] * 4
    tracker = make_tracker(server.tracking, print)
    tracker.metrics({"train/loss": 1.0, "train/norm": 1.0}, 1)
    assert tracker.close() == []
    assert keys(server) == [("train/loss", 1), ("train/norm", 1)]


def test_a_server_that_hangs_holds_up_one_checkpoint_for_a_moment_and_no_other(server: Server) -> None:
    server.open.clear()
    tracker = make_tracker(server.tracking, print)
    tracker.metrics({"train/loss": 1.0}, 1)
    began = time.monotonic()
    assert not tracker.flush()
    assert 0.4 < time.monotonic() - began < 3
    began = time.monotonic()
    for step in range(2, 100):
        tracker.metrics({"train/loss": 1.0}, step)
        assert not tracker.flush()
    assert time.monotonic() - began < 10  # waited for each time, it would be 49
    server.open.set()
    assert tracker.close() == []
    assert keys(server) == [("train/loss", step) for step in range(1, 100)]


def test_the_end_waits_shortly_for_a_server_that_was_away_all_the_time(server: Server) -> None:
    server.answers = [503] * 1000
    tracker = make_tracker(server.tracking, lambda text: None)
    tracker.metrics({"train/loss": 1.0}, 1)
    tracker.flush(20)
    assert server.failed.wait(20)
    began = time.monotonic()
    assert len(tracker.close(60)) == 1
    assert time.monotonic() - began < 10


def test_while_it_is_away_curves_get_thinner_and_keep_their_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_ROOM", 100)
    said: list[str] = []
    server.open.clear()
    tracker = make_tracker(server.tracking, said.append)
    tracker.wake()
    tracker.tags({"a": "b"})
    assert server.asked.wait(20)
    for step in range(1000):
        tracker.metrics({"train/loss": 1.0, **({"eval/loss": 1.0} if step % 100 == 0 else {})}, step)
        assert len(tracker._metrics) <= 101
    server.open.set()
    assert tracker.close() == []
    curve = [step for key, step in keys(server) if key == "train/loss"]
    assert curve == sorted(curve)
    assert curve[-1] == 999
    assert curve[0] == 0
    assert 10 < sum(step < 500 for step in curve) < len(curve)
    assert [step for key, step in keys(server) if key == "eval/loss"] == list(range(0, 1000, 100))
    (last,) = [line for line in said if line.endswith("metrics were left out while MLflow did not take them")]
    assert int(last.split()[0]) == 1010 - len(keys(server))


def test_thinning_evens_out_the_longest_curve() -> None:
    dense = [{"key": "a", "step": step} for step in range(100, 200)]
    rows = [{"key": "a", "step": 0}, {"key": "b", "step": 3}, {"key": "a", "step": 50}, *dense]
    steps = [(row["key"], row["step"]) for row in thinned(rows)]
    assert steps[:4] == [("a", 0), ("b", 3), ("a", 50), ("a", 100)]
    assert steps[-1] == ("a", 199)
    assert 25 < len(steps) < 60


def test_steps_that_an_earlier_attempt_logged_are_not_logged_again(server: Server) -> None:
    server.latest = {"train/loss": 12, "eval/loss": 10}
    tracker = make_tracker(server.tracking, print)
    tracker.resume(10)
    for step in range(11, 15):
        tracker.metrics({"train/loss": 1.0}, step)
    tracker.metrics({"eval/loss": 1.0, "train/new": 1.0}, 12)
    assert tracker.close() == []
    assert keys(server) == [("train/loss", 13), ("train/loss", 14), ("eval/loss", 12), ("train/new", 12)]


def test_credentials_come_from_mlflows_variables(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    tracker = make_tracker(server.tracking, print)
    tracker.tags({"a": "b"})
    tracker.close()
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_without_a_run_nothing_is_kept() -> None:
    tracker = make_tracker(None, print)
    tracker.metrics({"train/loss": 1.0}, 1)
    assert tracker.close() == []


def test_the_address_is_mlflows_own() -> None:
    assert Rest("http://h:1/")._base == "http://h:1/api/2.0/mlflow/"


def test_what_a_checkpoint_covers_is_sent_before_it(server: Server) -> None:
    tracker = make_tracker(server.tracking, print)
    tracker.metrics({"eval/loss": 1.0}, 0)
    assert tracker.flush(30)
    assert [metric["key"] for batch in server.batches for metric in batch["metrics"]] == ["eval/loss"]
    tracker.close()


def test_a_server_that_is_away_delays_no_checkpoint(server: Server) -> None:
    server.answers = [503] * 1000
    tracker = make_tracker(server.tracking, lambda text: None)
    tracker.metrics({"train/loss": 1.0}, 1)
    tracker.flush(30)
    assert server.failed.wait(20)
    tracker.metrics({"train/loss": 1.0}, 2)
    assert not tracker.flush(0)
    server.answers = []
    assert tracker.close(30) == []


def test_a_pod_may_reach_the_server_by_another_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.tracking.uri)
    tracker = make_tracker(Tracking("http://127.0.0.1:1", "abc", "0"), print)
    tracker.metrics({"train/loss": 1.0}, 1)
    tracker.close()
    assert keys(server) == [("train/loss", 1)]
