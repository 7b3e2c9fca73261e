"""Metrics reach MLflow, a server that is away ends no training, and the run's status is never touched."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dropforge.run import Tracking
from trainer.report.tracking import RestSender, make_tracker


@pytest.fixture(autouse=True)
def _no_ambient_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


class Server(ThreadingHTTPServer):
    """Takes batches as MLflow does, after failing as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
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
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200:
            self.server.batches.append({"path": self.path, **body})
            self.server.headers.append(dict(self.headers))
        else:
            self.server.failed.set()
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
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
    [row] = tracker.close(seconds=0.3)
    assert (row["key"], row["step"]) == ("train/loss", 1)
    assert any("away" in line for line in said)


def test_a_refusal_is_said_and_not_repeated(server: Server) -> None:
    said: list[str] = []
    server.answers = [400]
    tracker = make_tracker(server.tracking, said.append)
    tracker.metrics({"train/loss": 1.0}, 1)
    assert tracker.close() == []
    assert keys(server) == []
    assert "refuses" in said[0]


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
    assert RestSender(Tracking("http://h:1/", "r", "0"))._url == "http://h:1/api/2.0/mlflow/runs/log-batch"


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
    assert server.failed.is_set()
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
