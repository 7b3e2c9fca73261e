"""What Airflow's address may answer: servers that are none, that lie, and that do not end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from dropforge.client import airflow as module
from dropforge.client.airflow import FINETUNE, Airflow, last_error
from dropforge.client.progress import read_stages
from dropforge.errors import DropforgeError
from tests.strange_server import Answer, Server, chunks, told

CALLS: list[Callable[[Airflow], object]] = [
    lambda one: one.is_paused(FINETUNE),
    lambda one: one.dag_run(FINETUNE, "r")["state"],
    lambda one: [str(run["dag_run_id"]) for run in one.newest_runs(FINETUNE)],
    lambda one: one.count_runs(FINETUNE, "queued"),
    lambda one: read_stages(one, "r"),
    lambda one: one.question(FINETUNE, "r", "approve")["task_instance"]["state"],
    lambda one: one.mapped_states(FINETUNE, "r", "trial"),
    lambda one: one.trigger(FINETUNE, {}),
    lambda one: one.variable("a"),
]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[Server, Airflow]]]:
    servers: list[Server] = []

    def start(answer: Answer) -> tuple[Server, Airflow]:
        servers.append(server := Server(answer))
        return server, Airflow(server.url, "admin", "hidden")

    yield start
    for server in servers:
        server.stop()


Serve = Callable[[Answer], tuple[Server, Airflow]]
TYPES = {
    "dag_runs": 7,
    "task_instances": "x",
    "total_entries": "NaN",
    "is_paused": [],
    "state": {},
    "dag_run_id": None,
    "task_instance": 5,
}


@pytest.mark.parametrize(
    "value",
    [b"<html>", b"\xff", b"[]", b"null", b'{"a":' + b"[" * 100_000, b"{}", json.dumps(TYPES).encode(), b""],
    ids=["html", "bytes", "list", "null", "deep", "empty", "types", "nothing"],
)
def test_what_is_no_answer_of_airflow_is_said(serve: Serve, value: bytes) -> None:
    server, airflow = serve(told(value))
    for call in CALLS:
        with pytest.raises(DropforgeError, match="answers no JSON of Airflow to /api/v2") as error:
            call(airflow)
        assert error.value.thing == f"Airflow at {server.url}"
        assert "DROPFORGE_AIRFLOW_URL" in error.value.mend


def test_rows_are_of_airflows_kinds(serve: Serve) -> None:
    for row in (5, {}, {"dag_run_id": 5}):
        _, airflow = serve(told({"dag_runs": [row]}))
        with pytest.raises(DropforgeError, match="answers no JSON of Airflow"):
            [run["dag_run_id"] for run in airflow.newest_runs(FINETUNE)]
    for more in ({"start_date": "soon"}, {"start_date": "2026-01-01T00:00:00"}, {"try_number": "x"}, {"state": 5}):
        _, airflow = serve(told({"task_instances": [{"task_id": "train", "state": "running", **more}]}))
        with pytest.raises(DropforgeError, match=f"a `{next(iter(more))}` of another kind"):
            read_stages(airflow, "r")


@pytest.mark.parametrize("token", [b"<html>", b"[]", b"{}", b'{"access_token": 5}'])
def test_a_token_that_is_none_is_said(serve: Serve, token: bytes) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        told(token, 201)(handler) if handler.path == "/auth/token" else told({"detail": "no"}, 401)(handler)

    with pytest.raises(DropforgeError, match="answers no JSON of Airflow to /auth/token"):
        serve(answer)[1].is_paused(FINETUNE)


def test_a_login_that_is_refused_is_said(serve: Serve) -> None:
    with pytest.raises(DropforgeError, match=r"user 'admin' may not do this \(GET /api/v2/dags/.*: no\)"):
        serve(told({"detail": "no"}, 401))[1].is_paused(FINETUNE)
    for body in (b"<html>" + b"x" * 100_000, b"[" * 100_000, b'{"detail": ["' + b"y" * 100_000 + b'"]}'):
        with pytest.raises(DropforgeError, match="answered 500") as error:
            serve(told(body, 500))[1].is_paused(FINETUNE)
        assert len(str(error.value)) < 1000


def test_a_login_goes_to_no_other_server(serve: Serve) -> None:
    thief, _ = serve(told({"is_paused": True}))
    _, airflow = serve(told(b"", 302, Location=f"{thief.url}/stolen"))
    with pytest.raises(DropforgeError, match="answered 302"):
        airflow.is_paused(FINETUNE)
    assert thief.seen == []


def slow_head(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"H")
        time.sleep(0.02)


@pytest.mark.parametrize("answer", [chunks(b" ", 0.02), slow_head], ids=["body", "head"])
def test_a_byte_now_and_then_holds_nobody(serve: Serve, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    first = iter([told({"is_paused": True})])
    _, airflow = serve(lambda handler: next(first, answer)(handler))
    assert airflow.is_paused(FINETUNE)  # the next is sent on the same connection
    monkeypatch.setattr(module, "_WHOLE", 0.2)
    began = time.monotonic()
    with pytest.raises(DropforgeError, match="has not ended after 0 s"):
        airflow.is_paused(FINETUNE)
    assert time.monotonic() - began < 5


def test_an_answer_has_a_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1 << 20)
    with pytest.raises(DropforgeError, match="more than 1 MiB"):
        serve(chunks(b" " * 65536, 0))[1].is_paused(FINETUNE)


def test_a_list_that_does_not_end_is_left(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(first: int) -> Any:
        return {"task_instances": [{"task_id": "t", "map_index": first + n, "state": "success"} for n in range(50)]}

    server, airflow = serve(told(rows(0)))
    with pytest.raises(DropforgeError, match="a list that does not end"):
        airflow.mapped_states(FINETUNE, "r", "t")
    assert len(server.seen) == 2
    monkeypatch.setattr(module, "_MOST", 200)

    def grow(handler: BaseHTTPRequestHandler) -> None:
        told(rows(int(re.findall(r"offset=(\d+)", handler.path)[0])))(handler)

    server, airflow = serve(grow)
    with pytest.raises(DropforgeError, match="a list that does not end"):
        airflow.mapped_states(FINETUNE, "r", "t")
    assert len(server.seen) == 4


def test_a_log_of_any_shape_has_an_error_or_none() -> None:
    for details in ("x", [], [5], {"a": 1}, [{}]):
        assert last_error([{"error_detail": details}, 7, "line"]) in (None, "None")
    assert last_error([{"error_detail": [{"exc_value": "it broke\nLast lines of x"}]}]) == "it broke"


def test_tasks_of_several_runs_are_told_apart(serve: Serve) -> None:
    """Of all runs at once Airflow's pages name the same tasks again and again."""
    every = [{"dag_run_id": f"run-{n // 14}", "task_id": f"task-{n % 14}", "map_index": -1} for n in range(120)]

    def page(handler: BaseHTTPRequestHandler) -> None:
        first = int(re.findall(r"offset=(\d+)", handler.path)[0])
        told({"task_instances": every[first : first + 50]})(handler)

    assert serve(page)[1].task_states("~", "~") == every
