"""Who may start runs changes neither what their tasks wrote nor what a person has said."""

from __future__ import annotations

import re

import pytest
from airflow.api_fastapi.core_api.routes.public import authenticated_router
from dropforge_airflow import assets
from dropforge_airflow.write_guard import WriteGuard
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

DAGS = [value for name, value in vars(assets).items() if name.endswith("_DAG")]


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Airflow's own addresses, which answer to everybody here."""
    app = FastAPI()

    def reached() -> str:
        return "reached"

    for route in authenticated_router.routes:
        assert isinstance(route, APIRoute)
        app.add_api_route(f"/airflow/api/v2{route.path}", reached, methods=[*route.methods])
    app.add_middleware(WriteGuard)
    return TestClient(app)


def answers(client: TestClient, dag: str) -> dict[tuple[str, str], int]:
    """What each address of Airflow answers about a DAG, by method and path."""
    found = {}
    for route in authenticated_router.routes:
        assert isinstance(route, APIRoute)
        path = re.sub(r"\{\w+(:path)?\}", "x", route.path.replace("{dag_id}", dag))
        for method in route.methods:
            found[method, route.path] = client.request(method, f"/airflow/api/v2{path}").status_code
    return found


@pytest.mark.parametrize("dag", DAGS)
def test_nobody_writes_xcoms_or_task_state_of_our_dags(client: TestClient, dag: str) -> None:
    found = answers(client, dag)
    refused = {(method, path.rpartition("/{task_id}")[2]) for (method, path), status in found.items() if status == 403}
    assert refused == {
        ("POST", "/xcomEntries"),
        ("PATCH", "/xcomEntries/{xcom_key:path}"),
        ("DELETE", "/xcomEntries/{xcom_key:path}"),
        ("PUT", "/state-store/{key:path}"),
        ("PATCH", "/state-store/{key:path}"),
        ("DELETE", "/state-store/{key:path}"),
        ("DELETE", "/state-store"),
    }
    assert set(found.values()) == {200, 403}


def test_other_dags_are_left_alone(client: TestClient) -> None:
    assert set(answers(client, "somebodys_own").values()) == {200}


def test_a_refusal_says_what_to_do(client: TestClient) -> None:
    path = "/airflow/api/v2/dags/dropforge%5Ffinetune/dagRuns/a%20b/taskInstances/plan/xcomEntries/return_value"
    told = client.patch(path, json={"value": {}})
    assert told.status_code == 403
    assert "Trigger a run with other values, or clear the task" in told.json()["detail"]
