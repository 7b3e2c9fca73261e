"""What a person is asked after a clear is what the answer counts for, in Airflow's own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from airflow import settings
from airflow.api_fastapi.execution_api.routes import hitl
from airflow.api_fastapi.execution_api.security import require_auth
from airflow.models.base import Base
from airflow.models.hitl import HITLDetail
from airflow.models.taskinstance import TaskInstance
from dropforge_airflow.fresh_questions import FreshQuestions
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session, sessionmaker

TASK = UUID("0198a1f0-0000-7000-8000-000000000001")
OTHER = UUID("0198a1f0-0000-7000-8000-000000000002")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sessionmaker[Session]]:
    engine = create_engine(f"sqlite:///{tmp_path}/airflow.db")
    tables = [Base.metadata.tables[name] for name in ("task_instance", "hitl_detail", "dag_run", "dag_version")]
    Base.metadata.create_all(engine, tables)
    made = sessionmaker(engine, expire_on_commit=False)
    monkeypatch.setattr(settings, "NonScopedSession", made)
    with made.begin() as session:
        for task, dag in ((TASK, "dropforge_finetune"), (OTHER, "somebodys_own")):
            facts = {"id": task, "dag_id": dag, "task_id": "approve", "run_id": dag, "map_index": -1, "pool": "p"}
            session.execute(insert(TaskInstance).values(**facts, pool_slots=1))
    yield made
    engine.dispose()


@pytest.fixture
def client() -> TestClient:
    app = FastAPI(root_path="/airflow")
    execution = FastAPI()
    execution.include_router(hitl.router, prefix="/hitlDetails")
    execution.dependency_overrides[require_auth] = lambda: None
    app.mount("/execution", execution)
    app.post("/api/runs/{name:path}", status_code=201)(lambda name: name)
    app.add_middleware(FreshQuestions)
    return TestClient(app, raise_server_exceptions=False)


def asked(task: UUID, instead_of: int, *people: str) -> dict[str, Any]:
    users = [{"id": person, "name": person} for person in people]
    texts = {"subject": f"Instead of {instead_of}?", "body": f"| {instead_of} |", "defaults": ["No"]}
    return {"ti_id": str(task), "options": ["Yes", "No"], **texts, "assigned_users": users}


def shown(database: sessionmaker[Session], task: UUID) -> tuple[Any, ...]:
    with database() as session:
        found = session.get_one(HITLDetail, task)
        return found.subject, found.body, found.defaults, [user["id"] for user in found.assignees or []]


@pytest.mark.parametrize(("task", "fresh"), [(TASK, True), (OTHER, False)])
def test_a_question_that_is_asked_again_is_shown_as_it_is_asked(
    database: sessionmaker[Session], client: TestClient, task: UUID, fresh: bool
) -> None:
    address = f"/airflow/execution/hitlDetails/{task}"
    assert client.post(address, json=asked(task, 2, "ann")).status_code == 201
    assert client.post(address, json=asked(task, 1, "boss")).status_code == 201
    first, second = ("Instead of 2?", "| 2 |", ["No"], ["ann"]), ("Instead of 1?", "| 1 |", ["No"], ["boss"])
    assert shown(database, task) == (second if fresh else first)


def test_only_the_task_itself_changes_its_question(
    database: sessionmaker[Session], client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/airflow/execution/hitlDetails/{TASK}"
    client.post(address, json=asked(TASK, 2, "ann"))
    assert client.post(f"/airflow/api/runs/x{address}", json=asked(TASK, 1)).status_code == 201
    execution = client.app.routes[-2].app  # type: ignore[attr-defined]
    monkeypatch.setattr(execution, "dependency_overrides", {})
    assert client.post(address, json=asked(TASK, 1)).status_code >= 400
    assert shown(database, TASK)[0] == "Instead of 2?"


def test_a_question_that_cannot_be_shown_is_not_asked(
    database: sessionmaker[Session], client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropforge_airflow.fresh_questions.show", lambda *_: 1 / 0)
    assert client.post(f"/airflow/execution/hitlDetails/{TASK}", json=asked(TASK, 2)).status_code == 500
