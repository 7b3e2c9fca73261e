"""What MLflow's address may answer: servers that are none, that lie, and that do not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from dropforge import rest as rest_module
from dropforge.client.comparing.files import CANDIDATE, VERDICT, read_files
from dropforge.client.comparing.find import find_runs
from dropforge.client.patience import asking_rest
from dropforge.comparison import ComparedRun
from dropforge.errors import DropforgeError
from dropforge.rest import DeniedError, Rest
from dropforge.run import Tracking
from tests.strange_server import Answer, Server, chunks, told
from trainer.report import artifacts


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    """Start servers; this process has a login of MLflow's."""
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "airflow")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hidden")
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def slow_head(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"H")
        time.sleep(0.02)


def test_a_login_goes_to_no_other_server(serve: Callable[[Answer], Server]) -> None:
    thief = serve(told({}))
    for status in (302, 308):
        for place in (thief.url, thief.url.replace("127.0.0.1", "localhost")):
            sender = serve(told(b"", status, Location=f"{place}/stolen"))
            with pytest.raises(DeniedError, match=r"another server, http://.*MLFLOW_TRACKING_URI"):
                Rest(sender.url).call("GET", "experiments/search")
            with pytest.raises(OSError, match="another server"):
                artifacts.put_artifacts(Tracking(sender.url, "1", "1"), {"a": b"b"})
    assert thief.seen == []


def test_a_redirection_within_the_server_is_followed(serve: Callable[[Answer], Server]) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        moved = handler.path.startswith("/api")
        (told(b"", 302, Location="/below/") if moved else told({"a": 1}))(handler)

    server = serve(answer)
    assert Rest(server.url).call("GET", "experiments/search") == {"a": 1}
    assert [login is not None for _, login in server.seen] == [True, True]


@pytest.mark.parametrize(
    "answer", [chunks(b" ", 0.02), chunks(b" ", 0.02, 500), slow_head], ids=["body", "error", "head"]
)
def test_a_byte_now_and_then_holds_nobody(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(rest_module, "_WHOLE", 0.2)
    began = time.monotonic()
    with pytest.raises(OSError, match="has not ended after 0 s"):
        Rest(serve(answer).url).call("GET", "experiments/search")
    assert time.monotonic() - began < 5


def test_an_answer_has_a_bound(serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_module, "_LARGEST", 100_000)
    server = serve(chunks(b" " * 65536, 0))
    with pytest.raises(OSError, match="more than 100,000 bytes"):
        Rest(server.url).call("GET", "experiments/search")
    with pytest.raises(OSError, match="more than 5 bytes"):
        Rest(server.url).artifact("1", "mlflow-artifacts:/1", "verdict.md", 5)


@pytest.mark.parametrize(
    "value",
    [
        b"<html>",
        b"",
        [],
        None,
        b'{"a":' + b"[" * 100_000,
        {"experiments": 7},
        {"experiments": [7]},
        {"experiments": [{"experiment_id": 1}]},
        {"experiments": [{"experiment_id": "1", "name": "f"}], "runs": [{"info": {}, "data": None}]},
        {"experiments": [{"experiment_id": "1", "name": "f"}], "next_page_token": "again"},
        {"experiments": [{"experiment_id": "1", "name": "f"}], "runs": [], "next_page_token": ""},
    ],
    ids=["html", "empty", "list", "null", "deep", "number", "numbers", "nameless", "types", "token", "none"],
)
def test_whatever_is_answered_ends_as_an_error_for_a_person(serve: Callable[[Answer], Server], value: Any) -> None:
    server = serve(told(value))
    with pytest.raises(DropforgeError) as error, asking_rest(server.url), ThreadPoolExecutor(1) as pool:
        find_runs(Rest(server.url), ["fam-1"], pool)
    assert error.value.thing in {f"MLflow at {server.url}", "run fam-1"}


def test_pages_that_do_not_end_are_left(serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10_000))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        told({"runs": [{"info": {}}], "next_page_token": str(next(count))})(handler)

    monkeypatch.setattr(rest_module, "_MOST_PAGES", 5)
    with pytest.raises(ValueError, match="more than 5 pages"):
        list(Rest(serve(answer).url).pages("runs/search", {}, "runs"))
    assert next(count) == 5
    again = serve(told({"runs": [{"info": {}}], "next_page_token": "again"}))
    with pytest.raises(ValueError, match="pages that do not end"):
        list(Rest(again.url).pages("runs/search", {}, "runs"))
    assert len(again.seen) == 2


def test_files_of_a_run_that_are_too_long_are_noted(serve: Callable[[Answer], Server]) -> None:
    table = {"files": [{"path": CANDIDATE, "file_size": 10}, 7]}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if "artifacts/list" in handler.path:
            return told(table)(handler)
        return chunks(b" " * (1 << 20), 0)(handler)

    run = ComparedRun("r", "f", "1", "1", "FINISHED", verdict="promote", metrics={"candidate/gen/x": 1.0})
    server = serve(answer)
    checks, notes, own, _ = read_files(Rest(server.url), "mlflow-artifacts:/1", run, [run], True, True)
    assert (checks, own) == ((), {})
    assert [note.partition(" (")[0] for note in notes] == [f"{VERDICT} cannot be read", f"{CANDIDATE} cannot be read"]
    assert "more than 1,048,576 bytes" in notes[0]
    assert "more than 33,554,432 bytes" in notes[1]
    plain = ComparedRun("r", "f", "1", "1", "FINISHED")
    _, notes, _, _ = read_files(Rest(server.url), "mlflow-artifacts:/1", plain, [plain], False, True)
    assert notes[0].startswith("answers/ cannot be read")
