"""What an attempt tells MLflow: nothing twice, nothing lost without a word, and no other ending of a training."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.run import RunSpec, Tracking
from dropforge.store import Store, open_store
from trainer.data.prompts import Prompt
from trainer.gang import gang_from_env
from trainer.generate import Answer, Answers
from trainer.report.console import Console
from trainer.report.points import Points
from trainer.report.teller import Teller
from trainer.report.wall import Wall
from trainer.state.checkpoint import Seal

SEAL = Seal("fam-1", 2, 1, "p", {}, {"rank-0.safetensors": {"bytes": 1, "sha256": "a"}}, "digest-2", 3.0, tokens=9)


class Server(ThreadingHTTPServer):
    """MLflow without its calls for logged models. :ivar status: of the answer to every write."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.models = 200, 503
        self.points: list[tuple[str, int]] = []
        self.tags: dict[str, str] = {}
        self.root = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/runs/log-batch"):
            self._answer(self.server.models, {})
            return
        if self.server.status == 200:
            self.server.points += [(row["key"], row["step"]) for row in body["metrics"]]
            self.server.tags |= {tag["key"]: tag["value"] for tag in body["tags"]}
        self._answer(self.server.status, {})

    def do_GET(self) -> None:
        latest = dict(sorted(self.server.points, key=lambda point: point[1]))
        metrics = [{"key": key, "value": 1.0, "step": step} for key, step in latest.items()]
        info = {"artifact_uri": self.server.root}
        self._answer(200, {"run": {"info": info, "data": {"metrics": metrics}}})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = Server()
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


class Stage:
    """Makes tellers of one run's attempts. :ivar said: their lines for people."""

    def __init__(self, server: Server, root: Path) -> None:
        self.store: Store = open_store(str(root))
        self.said: list[str] = []
        tracking = Tracking(f"http://127.0.0.1:{server.server_address[1]}", "abc", "0")
        self.spec = RunSpec("fam-1", "fam", 1, str(root), str(root), "m", "d", {}, "c", tracking=tracking)

    def attempt(self, resumed_from: int | None = None) -> Teller:
        console = Console()
        console.say = self.said.append  # type: ignore[method-assign,assignment]
        settings: Any = SimpleNamespace(train=SimpleNamespace(profile=None, tensorboard=False))
        teller = Teller(self.spec, settings, gang_from_env(0, {}), self.store, console, Wall())
        teller.begin(resumed_from, 9)
        return teller

    def kept(self, folder: str) -> Any:
        (item,) = self.store.list(f"{folder}/")
        return json.loads(self.store.get(item.key))


@pytest.fixture
def stage(server: Server, tmp_path: Path) -> Stage:
    return Stage(server, tmp_path)


def test_an_attempt_that_was_killed_before_its_first_checkpoint_is_not_logged_twice(
    stage: Stage, server: Server
) -> None:
    for _ in range(2):
        teller = stage.attempt()
        for step in (1, 2, 3):
            teller.tracker.metrics({"train/loss": 1.0}, step)
        teller.close()
    assert server.tags["dropforge.attempt"] == "2"
    assert server.points == [("train/loss", 1), ("train/loss", 2), ("train/loss", 3)]


def test_tags_and_checkpoints_that_mlflow_never_took_are_kept_and_said(stage: Stage, server: Server) -> None:
    server.status = 503
    teller = stage.attempt()
    teller.tracker.metrics({"train/loss": 1.0}, 1)
    teller.checkpoints(stage.store, [SEAL], [{"step": 2, "eval/loss": 3.0}])
    teller.close(seconds=1.0)
    assert [row["step"] for row in stage.kept("unsent-metrics")] == [1]
    left = stage.kept("unsent-tags")
    assert left["tags"]["dropforge.last_checkpoint"] == "step-2"
    assert "step-2" in left["tags"]["dropforge.checkpoints"]
    (shown,) = left["checkpoints"]
    assert (shown["step"], shown["digest"], shown["metrics"]) == (2, "digest-2", {"eval/loss": 3.0})
    assert any("tags and 1 checkpoints as logged models" in line and "unsent-tags/1-" in line for line in stage.said)


def test_checkpoints_alone_that_are_not_shown_are_kept_too(stage: Stage, server: Server) -> None:
    teller = stage.attempt()
    teller.checkpoints(stage.store, [SEAL], [])
    assert teller.tracker.flush(30)
    teller.close(seconds=1.0)
    left = stage.kept("unsent-tags")
    assert [*left["tags"]] == ["dropforge.checkpoints"]  # in the models' place
    assert "dropforge.checkpoints" not in server.tags
    assert [item["step"] for item in left["checkpoints"]] == [2]
    assert server.tags["dropforge.last_checkpoint"] == "step-2"


def test_what_was_taken_leaves_no_file(stage: Stage, server: Server) -> None:
    server.models = 404  # an MLflow without logged models: the run's tag is what there is
    teller = stage.attempt()
    teller.tracker.metrics({"train/loss": 1.0}, 1)
    teller.checkpoints(stage.store, [SEAL], [])
    teller.close()
    assert list(stage.store.list("unsent-")) == []
    assert "step-2" in server.tags["dropforge.checkpoints"]


def test_answers_are_a_table_in_the_runs_folder_and_in_mlflow(stage: Stage, server: Server, tmp_path: Path) -> None:
    server.root = f"file://{tmp_path}/artifacts"
    prompts = [Prompt("01", "say é", (1, 2), "é"), Prompt("02", "", (), "none")]
    answers = Answers(prompts, [Answer("é", 1, True, "é"), None], ("exact-match",))
    teller = stage.attempt()
    evaluations: list[dict[str, Any]] = []
    for step in (0, 2, 4):
        evaluations.append({"step": step, "asked_rows": 2} if step != 2 else {"step": step})
        if step != 2:
            teller.answered(answers, evaluations)
    loop: Any = SimpleNamespace(log=SimpleNamespace(points=Points()), saving=SimpleNamespace(grace_left=lambda: 60.0))
    teller.failed(loop, RuntimeError("it was asked to stop"))
    teller.close()
    # As mlflow.log_table notes and writes it.
    assert json.loads(server.tags["mlflow.loggedArtifacts"]) == [
        {"path": f"answers/step-{step}.json", "type": "table"} for step in (0, 4)
    ]
    for step in (0, 4):
        kept = stage.store.get(f"answers/step-{step}.json")
        assert kept == (tmp_path / "artifacts" / "answers" / f"step-{step}.json").read_bytes()
        assert json.loads(kept) == {
            "columns": ["step", "row", "prompt", "reference", "answer", "ended", "exact-match"],
            "data": [[step, "01", "say é", "é", "é", True, 1.0], [step, "02", "", "none", "", False, 0.0]],
        }


def test_whatever_a_store_raises_does_not_replace_how_the_training_ended(
    stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = 503
    teller = stage.attempt()
    teller.tracker.metrics({"train/loss": 1.0}, 1)

    def away(*_: object) -> None:
        raise RuntimeError("An error occurred (SlowDown)")  # S3's errors are of no class of ours

    monkeypatch.setattr(stage.store, "put", away)
    teller.board = SimpleNamespace(close=away)  # type: ignore[assignment]
    teller.close(seconds=1.0)
    assert sum("could not be stored either (RuntimeError: An error occurred (SlowDown))" in line for line in stage.said)
    assert any(line.startswith("TensorBoard's files could not be ended") for line in stage.said)
