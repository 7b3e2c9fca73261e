"""What the commands talk to: a real MLflow and a real S3, and Airflow's answers as the tests set them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from typer.testing import CliRunner, Result

from dropforge.cli import checkpoints, compare, drops, queue, resume, runs, stop, submit, top
from dropforge.cli.app import app
from dropforge.client.airflow import FINETUNE
from dropforge.settings import Settings
from dropforge.stages import STAGES
from dropforge.store import S3Store
from dropforge.terminal import Console


@dataclass
class DagRun:
    """A run of `dropforge_finetune`, or of `dag`.

    `states` are those of its first stages; `error` is what the last one's log says; `xcoms` are of all its tasks.
    """

    name: str
    state: str
    states: tuple[str, ...] = ()
    error: str = ""
    partition_key: str | None = None
    conf: dict[str, Any] = field(default_factory=dict)
    xcoms: dict[str, Any] = field(default_factory=dict)
    began: str = "2100-01-01T00:00:00Z"
    looks: int = 0
    ends_at_look: int = 0
    dag: str = FINETUNE

    def row(self) -> dict[str, Any]:
        return {
            "dag_run_id": self.name,
            "state": self.state,
            "conf": self.conf,
            "partition_key": self.partition_key,
            "run_after": self.began,
            "start_date": self.began,
        }


class FakeAirflow(ThreadingHTTPServer):
    """The answers of Airflow's API that the commands read, in its shapes.

    :ivar away: how many of the next questions get no such answer. :ivar denied: whether nobody may change anything.
    :ivar unseen: runs that come just before one of the same name is triggered.
    :ivar orders: what it was told to do. :ivar submitted: what becomes of a run that is triggered.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.dag_runs: dict[str, DagRun] = {}
        self.unseen: dict[str, DagRun] = {}
        self.away = 0
        self.denied = self.paused = False
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.submitted = DagRun("manual__1", "running", ("running",))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, run: DagRun) -> DagRun:
        self.dag_runs[run.name] = run
        return run

    def answer(self, path: str) -> dict[str, Any]:
        parts = urlsplit(path)
        dag, runs, below = unquote(parts.path).partition("/dagRuns")
        if not runs:
            return {"is_paused": self.paused}
        if not below:
            wanted = parse_qs(parts.query).get("state")
            found = [run for run in self.dag_runs.values() if wanted in (None, [run.state])]
            return {"dag_runs": [run.row() for run in sorted(found, key=lambda run: run.began, reverse=True)]}
        name, _, rest = below.removeprefix("/").partition("/")
        run = self.dag_runs[name]
        if not dag.endswith(f"/{run.dag}"):
            raise KeyError(name)
        if not rest:
            run.looks += 1
            if run.looks == run.ends_at_look:
                run.state = "success"
            return run.row()
        if rest == "taskInstances":
            tasks = [
                {"task_id": stage, "state": state, "try_number": 1}
                for stage, state in zip(STAGES, run.states, strict=False)
            ]
            return {"task_instances": tasks}
        if "/xcomEntries/" in rest:
            return {"value": json.dumps(run.xcoms[rest.rpartition("/")[2]])}
        if rest.endswith("/listMapped"):
            states = enumerate(run.states)
            return {"task_instances": [{"map_index": number, "state": state} for number, state in states]}
        details = {"error_detail": [{"exc_type": "E", "exc_value": run.error}]} if run.error else {}
        return {"content": [{"event": "Task failed", **details}]}

    def obey(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Start, end or clear a run."""
        self.orders.append((unquote(path).rpartition("dropforge_finetune/")[2], body))
        if path.endswith("/dagRuns"):
            self.add(self.submitted).conf = body["conf"]
            return self.submitted.row()
        if "state" in body:
            self.dag_runs[unquote(path).rpartition("/")[2]].state = body["state"]
        return {}


class _Handler(BaseHTTPRequestHandler):
    server: FakeAirflow

    def do_GET(self) -> None:
        self.server.away -= (away := self.server.away > 0)
        if away:
            self._say(503, b"")
            return
        try:
            self._say(200, json.dumps(self.server.answer(self.path)).encode())
        except KeyError:
            self._say(404, b'{"detail": "there is no such run"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.denied:
            self._say(403, b'{"detail": "Forbidden"}')
        elif self.path.endswith("/dagRuns") and body.get("dag_run_id") in self.server.unseen:
            self.server.dag_runs |= self.server.unseen
            self._say(409, b'{"detail": {"reason": "Unique constraint violation"}}')
        else:
            self._say(200, json.dumps(self.server.obey(self.path, body)).encode())

    do_PATCH = do_POST  # noqa: N815 - the name that is called

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def airflow() -> Iterator[FakeAirflow]:
    server = FakeAirflow()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


class Terminal:
    """Types commands, connected to the services of the test."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--state", str(self.state)])


@pytest.fixture
def terminal(
    mlflow_server: str, s3_store: S3Store, airflow: FakeAirflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    settings = Settings(s3_store.bucket, s3_store.bucket, "", mlflow_server, airflow.url, tmp_path)
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    for module in (checkpoints, compare, drops, queue, resume, runs, stop, submit, top):
        monkeypatch.setattr(module, "console", Console(width=200))
    return Terminal(tmp_path / "no-stack")
