"""Airflow's API takes no body that is longer than the stack allows, whoever sends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from airflow.api_fastapi.app import init_plugins
from dropforge_airflow import body_limit, fresh_questions, write_guard
from dropforge_airflow.plugin import DropforgePlugin
from fastapi import Body, FastAPI
from fastapi.testclient import TestClient
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from dropforge.stack.http_bounds import BoundedHttp

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.post("/count")
    def count(values: Annotated[list[int], Body()]) -> int:
        return len(values)

    app.add_middleware(body_limit.BodyLimit, largest=1000)
    return TestClient(app)


def test_a_body_is_bounded_however_it_is_sent(client: TestClient) -> None:
    def pieces(count: int) -> Iterator[bytes]:
        yield b"[1"
        for _ in range(count):
            yield b",1"
        yield b"]"

    assert client.post("/count", json=[1] * 300).json() == 300
    assert client.post("/count", content=pieces(400), headers=JSON).json() == 401
    assert client.post("/count", json=[1] * 1000).status_code == 413
    assert client.post("/count", content=pieces(1000), headers=JSON).status_code == 413
    assert client.get("/count").status_code == 405


def test_only_who_asks_for_it_has_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(body_limit.VARIABLE, raising=False)
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", "uvicorn's own")
    assert body_limit.middlewares() == []
    assert HTTP_PROTOCOLS["auto"] == "uvicorn's own"
    monkeypatch.setenv(body_limit.VARIABLE, "1000")
    found: tuple[list[Any], list[Any]] = [], body_limit.middlewares()
    monkeypatch.setattr("airflow.plugins_manager.get_fastapi_plugins", lambda: found)
    app = FastAPI()
    init_plugins(app)
    assert TestClient(app).post("/", content=b"x" * 1001).status_code == 413
    assert import_from_string(HTTP_PROTOCOLS["auto"]) is BoundedHttp
    named = [middleware["name"] for middleware in DropforgePlugin.fastapi_root_middlewares]
    assert named == [guard.middleware()["name"] for guard in (write_guard, fresh_questions)]


@pytest.mark.parametrize("largest", ["64MiB", "-1", "0", "1e6", "9" * 16])
def test_a_bound_that_is_no_number_ends_what_would_be_without_one(
    largest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(body_limit.VARIABLE, largest)
    with pytest.raises(SystemExit, match=rf"{body_limit.VARIABLE}: '{largest}' is no number of bytes"):
        body_limit.middlewares()
