"""What a training leaves for people: curves, and a model card that the hub's own reader understands."""

from __future__ import annotations

import itertools
import json
import math
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from dropforge.run import RunSpec, Tracking
from dropforge.store import open_store
from trainer.rank import run
from trainer.report.artifacts import keep_files, put_artifacts
from trainer.report.card import model_card
from trainer.report.console import Console
from trainer.report.curves import draw_curves
from trainer.report.points import COLUMNS, MOST, Points
from trainer.state.stop import PreemptedError, StopSignal

from .toy import Toy


def test_points_stay_few_and_spread_over_the_whole_training() -> None:
    points = Points()
    for step in range(1, 10 * MOST + 1):
        points.add(step, {"loss": float(step)})
        assert len(points.rows) <= MOST
    steps, losses = points.column("loss")
    assert steps == losses
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert len(gaps) == 1  # as dense at the end as at the beginning
    assert steps[0] == 1
    assert steps[-1] > 10 * MOST - 2 * gaps.pop()


def test_points_go_on_where_a_checkpoint_left_them() -> None:
    whole, first = Points(), Points()
    for step in range(1, 1001):
        whole.add(step, {"loss": 1 / step})
    for step in range(1, 701):
        first.add(step, {"loss": 1 / step})
    second = Points.load(json.loads(json.dumps(first.plain())))
    for step in range(701, 1001):
        second.add(step, {"loss": 1 / step})
    assert second.plain() == whole.plain()
    assert Points.load({}).rows == Points.load({"columns": ["step"], "rows": [[1]]}).rows == []


def test_what_is_no_number_leaves_a_gap() -> None:
    points = Points()
    points.add(1, {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 0.1234567891})
    assert points.column("loss") == points.column("grad_norm") == ([], [])
    assert points.column("learning_rate") == ([1.0], [0.123457])


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("count", [0, 1, 60])
def test_any_number_of_points_makes_a_picture(count: int) -> None:
    points = Points()
    for step in range(1, count + 1):
        points.add(step, dict.fromkeys(COLUMNS, 1.0 + step))
    evaluations = [{"step": 0, "eval/loss": 3.0}, {"step": 1}]
    assert size(draw_curves(points, evaluations, [1] if count else [], "run <&$_^>", "step 1")) == (1200, 1000)


class Drawn:
    """Hears what matplotlib is told to draw."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from matplotlib.axes import Axes

        self.lines: list[tuple[list[float], list[float], str | None]] = []
        self.marks: list[float] = []
        plot, mark = Axes.plot, Axes.axvline

        def plotted(axes: Any, x: Any, y: Any, *args: Any, **options: Any) -> Any:
            self.lines.append((list(x), list(y), options.get("label")))
            return plot(axes, x, y, *args, **options)

        def marked(axes: Any, x: float = 0, *args: Any, **options: Any) -> Any:
            self.marks.append(x)
            return mark(axes, x, *args, **options)

        patch.setattr(Axes, "plot", plotted)
        patch.setattr(Axes, "axvline", marked)


def stop_at(step: int, stop: StopSignal) -> Console:
    console = Console(quiet=True)

    def hear(now: int, **facts: object) -> None:
        if now == step:
            stop.since = time.monotonic()

    console.progress = hear  # type: ignore[method-assign,assignment]
    return console


def test_a_resumed_run_has_one_curve_and_a_card_with_all_attempts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(address)
    made = client.create_run(client.create_experiment("toy", artifact_location=str(tmp_path / "artifacts")))
    tracking = Tracking(address, made.info.run_id, made.info.experiment_id)
    uri = toy.run("two", tracking, train={"max_steps": 8, "checkpoint_every": 4, "eval_every": 4, "log_every": 1})
    files, drawn, stop = toy.files("two"), Drawn(monkeypatch), StopSignal()
    with pytest.raises(PreemptedError):
        run(uri, stop, stop_at(5, stop))  # the step after it is the last
    assert size(files.get("curves.png")) == (1200, 1000)  # a run that was stopped has its picture
    assert drawn.lines[0][0] == [1, 2, 3, 4, 5, 6]
    drawn.lines.clear()
    run(uri, StopSignal(), Console(quiet=True))
    assert drawn.lines[0][0] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step for step, *_ in zip(*drawn.lines[1][:2], strict=True)] == [0, 4, 8]
    assert set(drawn.marks) == {6}

    card = ModelCard(files.get("model/README.md").decode())
    facts = card.data.to_dict()
    assert facts["library_name"] == "transformers"
    assert facts["pipeline_tag"] == "text-generation"
    assert "base_model" not in facts  # there is none on the hub
    report = json.loads(files.get("report.json"))
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["loss"] == report["eval"]["after"]["eval/loss"]
    assert {result.dataset_revision for result in card.data.eval_results} == {toy.digest}
    for text in (
        "resumed from step 6",
        toy.digest,
        report["model"]["digest"],
        "arithmetic: fp32",
    ):
        assert text in card.text
    assert "More Information Needed" not in card.text

    there = {item.path for item in client.list_artifacts(made.info.run_id)}
    assert {"curves.png", "model"} <= there
    assert (tmp_path / "artifacts" / made.info.run_id / "artifacts/model/README.md").read_bytes() == files.get(
        "model/README.md"
    )


REPORT: dict[str, Any] = {
    "steps": 10, "exported_step": 10, "ended": "all steps", "epochs": 1.0, "tokens": 1000, "target_tokens": 500,
    "tokens_per_second": 12.3, "mfu": 0.41, "skipped": [{"step": 3, "rows": ["aa"], "count": 1}],
    "attempts": [{"attempt": 1, "resumed_from": None}], "wall": {"seconds": 12.0, "restarts": 0.0},
    "eval": {"before": {"eval/loss": 3.0}, "after": {"eval/loss": 2.0, "rows": 7, "target_tokens": 9,
                                                            "precision": "bf16"}},
    "packing": {"packs": False, "reason": "the recipe says so", "train": {"rows": 5}, "eval": {}},
    "model": {"digest": "d" * 64, "max_logit_difference": 1e-6}, "environment": {"torch": "2.15", "device": "cpu"},
}  # fmt: skip


def spec(toy: Toy, **overrides: Any) -> RunSpec:
    return RunSpec.from_json(Path(toy.run("card", **overrides)).read_bytes())


def test_a_base_of_the_hub_is_named_with_its_revision_and_adapters(toy: Toy) -> None:
    base = {"model": "org/some-model", "revision": "abc123", "scratch": None}
    card = ModelCard(model_card(spec(toy, base=base, train={"method": "lora"}), REPORT))
    assert card.data.base_model == "org/some-model"
    assert card.data.base_model_relation == "finetune"
    assert "lora" in card.data.tags
    told = ["`abc123`", "adapters", "`lora.r`", "1: 3", "Rows hold one document each", "arithmetic: bf16"]
    for text in (*told, "3.0000", "2.0000", "41.0%"):
        assert text in card.text


@pytest.mark.parametrize("model", ["s3://bucket/models/base", "/models/base"])
def test_a_base_that_no_hub_has_stays_out_of_the_front_matter(toy: Toy, model: str) -> None:
    card = ModelCard(model_card(spec(toy, base={"model": model, "scratch": None}), REPORT))
    assert card.data.base_model is None
    assert f"`{model}`" in card.text
    assert "no revision was pinned" in card.text


def test_a_card_of_a_run_without_evaluation_says_so(toy: Toy) -> None:
    bare = REPORT | {"eval": {"before": None, "after": None}, "attempts": [], "wall": {}, "mfu": None, "skipped": []}
    card = ModelCard(model_card(spec(toy), bare))
    assert "Not measured" in card.text
    assert card.data.eval_results is None


class Server(ThreadingHTTPServer):
    """An MLflow server that keeps artifacts itself. :ivar refuse: status of its answers to uploads."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.root, self.refuse, self.tokens = "mlflow-artifacts:/3/abc/artifacts", 200, set[str]()

    @property
    def tracking(self) -> Tracking:
        return Tracking(f"http://127.0.0.1:{self.server_address[1]}", "abc", "3")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/api/2.0/mlflow/runs/get?run_id=abc"
        self._answer(200, json.dumps({"run": {"info": {"artifact_uri": self.server.root}}}).encode())

    def do_PUT(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization", ""))
        self.server.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.server.refuse, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

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


def test_a_server_that_keeps_artifacts_gets_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    put_artifacts(server.tracking, {"curves.png": b"png", "model/a b.md": b"text"})
    base = "/api/2.0/mlflow-artifacts/artifacts/3/abc/artifacts"
    assert server.files == {f"{base}/curves.png": b"png", f"{base}/model/a%20b.md": b"text"}
    assert server.tokens == {"Bearer secret"}


def test_another_host_that_a_run_names_gets_files_and_no_credentials(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Server()
    threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
    try:
        server.root = f"mlflow-artifacts://127.0.0.1:{other.server_address[1]}/3/abc/artifacts"
        for name, secret in {"MLFLOW_TRACKING_USERNAME": "anna", "MLFLOW_TRACKING_TOKEN": "secret"}.items():
            monkeypatch.setenv(name, secret)
            put_artifacts(server.tracking, {f"{name}.png": b"png"})
        assert len(other.files) == 2
        assert other.tokens == {""}
    finally:
        other.shutdown()
        other.server_close()


def test_artifacts_of_a_folder_are_written_there(server: Server, tmp_path: Path) -> None:
    server.root = f"file://{tmp_path}/mine"
    put_artifacts(server.tracking, {"curves.png": b"png"})
    assert (tmp_path / "mine" / "curves.png").read_bytes() == b"png"
    assert server.files == {}


def test_whatever_goes_wrong_is_said_and_the_rest_is_done(server: Server, tmp_path: Path) -> None:
    server.refuse = 503
    said: list[str] = []
    store = open_store(str(tmp_path / "run"))
    keep_files(lambda: {"a": b"1"}, store, server.tracking, said.append, "curves").join(20)
    assert store.get("a") == b"1"
    assert [line.split(" (")[0] for line in said] == ["MLflow did not take curves"]
    said.clear()
    keep_files(lambda: {"a": b"1" if 1 // 0 else b""}, store, server.tracking, said.append, "curves").join(20)
    assert said == ["curves could not be made (ZeroDivisionError: integer division or modulo by zero)"]
    (tmp_path / "file").write_text("no folder")
    said.clear()
    keep_files(lambda: {"a": b"1"}, open_store(str(tmp_path / "file")), None, said.append, "curves").join(20)
    assert said[0].startswith("curves could not be stored in ")
