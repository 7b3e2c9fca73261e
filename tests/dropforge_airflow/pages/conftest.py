"""Airflow's own API server with the plugin in it, on a database of its own; S3 and MLflow are real too."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow import run_notes
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.pages import look
from starlette.testclient import TestClient

from dropforge.store import S3Store

ROOT = Path(__file__).parents[3]
BEGAN = datetime(2026, 11, 24, 10, tzinfo=UTC)
SETTINGS = {
    "AIRFLOW__CORE__AUTH_MANAGER": "tests.dropforge_airflow.pages.rights.PerDag",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
    "AIRFLOW__API_AUTH__JWT_SECRET": "x" * 64,
    "AIRFLOW__API__SECRET_KEY": "y" * 32,
}


@dataclass
class Server:
    """The API server, with what tests put into its database and ask of it."""

    client: TestClient
    runs: int = field(default=0)

    def get(self, path: str, user: str | None = "viewer", role: str = "VIEWER", **query: Any) -> Any:
        """Ask as a user with this role; as nobody if it is None."""
        headers = {}
        if user is not None:
            from airflow.api_fastapi.app import get_auth_manager
            from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

            token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=user, role=role))
            headers = {"Authorization": f"Bearer {token}"}
        return self.client.get(f"/dropforge{path}", params=query, headers=headers)

    def tab(self, dag_run: str, task: str | None = "train", **more: Any) -> Any:
        chosen = {} if task is None else {"task_id": task}
        return self.get(f"/dags/{FINETUNE_DAG}/task.json", run_id=dag_run, **chosen, **more)

    def run(
        self,
        dag_run: str,
        tasks: dict[str, str] | None = None,
        *,
        dag: str = FINETUNE_DAG,
        state: str = "running",
        opened: dict[str, Any] | None = None,
        job: dict[str, Any] | None = None,
        failed: str = "train",
        failure: str | None = None,
    ) -> str:
        """Put a run into Airflow's database.

        :param tasks: their states. :param opened: what `open_run` returned. :param job: what `train` has published.
        :param failed, failure: a task, and why it failed.
        """
        from airflow.models.dag import DagModel
        from airflow.models.dagrun import DagRun
        from airflow.models.taskinstance import TaskInstance
        from airflow.models.xcom import XComModel
        from airflow.utils.session import create_session
        from sqlalchemy import insert, select

        tasks = {"open_run": "success", "train": "running"} if tasks is None else tasks
        self.runs += 1
        with create_session(scoped=False) as session:
            if session.get(DagModel, dag) is None:
                session.execute(_bundle())
                session.add(DagModel(dag_id=dag, bundle_name="pages", is_paused=False))
                session.flush()
            session.execute(
                insert(DagRun).values(
                    dag_id=dag, run_id=dag_run, run_type="manual", state=state, run_after=BEGAN, start_date=BEGAN
                )
            )
            number = session.scalars(select(DagRun.id).where(DagRun.dag_id == dag, DagRun.run_id == dag_run)).one()
            for place, (task, of) in enumerate(tasks.items()):
                session.execute(
                    insert(TaskInstance).values(
                        id=uuid.uuid4(), dag_id=dag, run_id=dag_run, task_id=task, map_index=-1, state=of, try_number=1,
                        start_date=BEGAN + timedelta(seconds=place), pool="default_pool", pool_slots=1, queue="default",
                        executor_config={}, span_status="not_started",
                    )
                )  # fmt: skip
            told = [("open_run", key, value) for key, value in (opened or {}).items()]
            told += [("train", "pytorch_job", job)] if job else []
            told += [(failed, run_notes.FAILURE, failure)] if failure else []
            for task, key, value in told:
                session.execute(
                    insert(XComModel).values(
                        dag_run_id=number, dag_id=dag, run_id=dag_run, task_id=task, map_index=-1, key=key,
                        value=json.dumps(value),
                    )
                )  # fmt: skip
        return dag_run


def _bundle() -> Any:
    from airflow.models.dagbundle import DagBundleModel
    from sqlalchemy.dialects.sqlite import insert

    return insert(DagBundleModel).values(name="pages", active=True).on_conflict_do_nothing()


@pytest.fixture(scope="session")
def airflow_api() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        for key, value in SETTINGS.items():
            patched.setenv(key, value)
        patched.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE", f"{os.environ['AIRFLOW_HOME']}/passwords")
        patched.setattr(look, "PATIENCE", 60.0)  # a busy machine is no service that is away
        from airflow import plugins_manager, settings
        from airflow.api_fastapi.app import create_app, purge_cached_app
        from airflow.models import import_all_models
        from airflow.models.base import Base

        import_all_models()
        Base.metadata.create_all(settings.engine)
        patched.setattr(settings, "PLUGINS_FOLDER", str(ROOT / "plugins"))
        caches = [plugins_manager._get_plugins, plugins_manager.get_fastapi_plugins, plugins_manager._get_ui_plugins]
        for cache in caches:
            cache.cache_clear()
        purge_cached_app()
        try:
            with TestClient(create_app("core"), raise_server_exceptions=False) as client:
                yield Server(client)
        finally:
            purge_cached_app()
            for cache in caches:
                cache.cache_clear()


@pytest.fixture
def server(airflow_api: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server beside a bucket and an MLflow that are away, unless a test brings them."""
    monkeypatch.setenv("DROPFORGE_BUCKET", "nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv(
        "AIRFLOW_CONN_DROPFORGE_S3",
        json.dumps({"conn_type": "aws", "login": "test", "password": "s3cr3t", "extra": {
            "endpoint_url": "http://127.0.0.1:1", "region_name": "us-east-1"}}),
    )  # fmt: skip
    return airflow_api


@pytest.fixture
def bucket(server: Server, s3_store: S3Store, aws: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A bucket that the server reads."""
    connection = {"conn_type": "aws", "login": "test", "password": "test"}
    extra = {"endpoint_url": aws, "region_name": "us-east-1"}
    monkeypatch.setenv("AIRFLOW_CONN_DROPFORGE_S3", json.dumps({**connection, "extra": extra}))
    monkeypatch.setenv("DROPFORGE_BUCKET", s3_store.bucket)
    return s3_store
