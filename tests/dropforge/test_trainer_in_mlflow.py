"""What the trainer tells a real MLflow server while it trains."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dropforge import rest, tracking, unsent
from dropforge.checkpoints import NOTE, NOTE_LINE
from dropforge.rest import Rest
from dropforge.run import Tracking
from dropforge.store import FolderStore
from trainer.report.models import DELETED, Models, make_models, shown
from trainer.report.tracking import make_tracker, tag_run
from trainer.state.checkpoint import Seal

ROOT = "s3://bucket/runs/fam-1"


@pytest.fixture
def run(mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow = tracking.client(mlflow_server)
    experiment = mlflow.create_experiment(f"fam-{uuid.uuid4().hex[:8]}")
    return Tracking(mlflow_server, mlflow.create_run(experiment).info.run_id, experiment)


def seal(step: int, loss: float | None = None, content: str = "") -> Seal:
    files = {"rank-0.safetensors": {"bytes": 1_500_000, "sha256": "a"}}
    return Seal("fam-1", step, 1, "p", {}, files, f"digest-{step}{content}", loss, tokens=100 * step)


def attempt(run: Tracking, *shows: Sequence[Seal], say: Callable[[str], None] = print) -> None:
    """An attempt that evaluates at each checkpoint and has it seen."""
    tracker = make_tracker(run, say)
    tracker.resume(0)
    models = make_models(run, tracker, say, ("fam", "d" * 36))
    assert models is not None
    for seals in shows:
        measured = [{"step": item.step, "eval/loss": item.eval_loss, "targets": 7} for item in seals if item.eval_loss]
        for row in measured:
            tracker.metrics({"eval/loss": row["eval/loss"]}, int(row["step"]))
        end = time.monotonic() + 60
        while not tracker.flush():  # on a busy machine the server may have been slow the last time
            assert time.monotonic() < end
            time.sleep(0.01)
        models.show(shown(ROOT, seals, measured))
        tracker.wake()
        while models.waits():
            assert time.monotonic() < end
            time.sleep(0.01)
    assert tracker.close() == []


def seen(run: Tracking) -> dict[str, Any]:
    found = tracking.client(run.uri).search_logged_models([run.experiment_id])
    assert len({model.name for model in found}) == len(found)
    return {model.name: model for model in found}


def marks(run: Tracking) -> dict[str, set[str]]:
    names = {"dropforge.best", "dropforge.last", "dropforge.deleted"}
    return {name: {tag.partition(".")[2] for tag in names & set(model.tags)} for name, model in seen(run).items()}


def test_a_checkpoint_is_a_logged_model_with_its_figures(run: Tracking) -> None:
    attempt(run, [seal(10, 5.0)])
    (model,) = seen(run).values()
    assert (model.name, model.model_type, model.status.name) == ("step-10", "checkpoint", "READY")
    assert model.source_run_id == run.run_id
    facts = {"step": "10", "tokens": "1000", "bytes": "1500000", "digest": "digest-10", "run": "fam-1"}
    facts["uri"] = f"{ROOT}/checkpoints/step-10"
    assert model.params == facts
    assert {key: model.tags[f"dropforge.{key}"] for key in facts} == facts
    assert "best and last" in model.tags[NOTE]
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [("eval/loss", 5.0, 10)]
    assert [(metric.dataset_name, metric.dataset_digest) for metric in model.metrics] == [("fam", "d" * 36)]
    mlflow = tracking.client(run.uri)
    assert len(mlflow.get_metric_history(run.run_id, "eval/loss")) == 1
    outputs = mlflow.get_run(run.run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(model.model_id, 10)]


def test_marks_move_and_what_retention_deletes_is_marked(run: Tracking) -> None:
    attempt(run, [seal(10, 5.0)], [seal(10, 5.0), seal(20, 4.0)], [seal(20, 4.0), seal(30, 6.0)])
    assert marks(run) == {"step-10": {"deleted"}, "step-20": {"best"}, "step-30": {"last"}}
    assert seen(run)["step-10"].tags[NOTE].startswith("**Deleted**")
    states = {name: model.status.name for name, model in seen(run).items()}
    assert states == {"step-10": "FAILED", "step-20": "READY", "step-30": "READY"}
    attempt(run, [seal(10, 5.0)])  # a resumed training has made it again
    assert (marks(run)["step-10"], seen(run)["step-10"].status.name) == ({"best", "last"}, "READY")


def test_another_attempt_finds_what_is_there(run: Tracking) -> None:
    for _ in range(2):
        attempt(run, [seal(10, 5.0), seal(20)])
    assert marks(run) == {"step-10": {"best"}, "step-20": {"last"}}
    # Evaluated only after it was saved, and after a kill.
    attempt(run, [seal(10, 5.0), seal(20, 4.5)])
    assert marks(run) == {"step-10": set(), "step-20": {"best", "last"}}
    assert [metric.value for metric in seen(run)["step-20"].metrics] == [4.5]
    assert len(tracking.client(run.uri).get_metric_history(run.run_id, "eval/loss")) == 2


def test_an_attempt_that_was_killed_in_between_leaves_no_second_one(run: Tracking) -> None:
    class Killed(Rest):
        """Passes calls on until one of them is answered by nobody."""

        def __init__(self, left: int) -> None:
            super().__init__(run.uri)
            self.left = left

        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            found = super().call(method, path, body)
            self.left -= 1
            if not self.left:
                raise OSError("no answer")
            return found

    kills = 0
    for calls in (1, 2, 3, 2, 2, 3, 2, 3):  # behind each call of the way
        models = Models(Killed(calls), run, print)
        models.show(shown(ROOT, [seal(10, 5.0)], [{"step": 10, "eval/loss": 5.0}]))
        with suppress(OSError):
            models.work()
        kills += models.waits()
    assert kills >= 6
    models = Models(Rest(run.uri), run, print)
    models.show(shown(ROOT, [seal(10, 5.0)], [{"step": 10, "eval/loss": 5.0}]))
    models.work()
    assert not models.waits()
    assert marks(run) == {"step-10": {"best", "last"}}
    assert seen(run)["step-10"].status.name == "READY"


def test_a_checkpoint_that_was_written_again_with_other_bytes_is_another_one(run: Tracking) -> None:
    attempt(run, [seal(10, 5.0)])
    attempt(run, [seal(10, 5.0, "-again")])
    found = tracking.client(run.uri).search_logged_models([run.experiment_id])
    assert {model.tags["dropforge.digest"]: DELETED in model.tags for model in found} == {
        "digest-10": True,
        "digest-10-again": False,
    }


def test_what_others_wrote_below_the_description_stays(run: Tracking) -> None:
    attempt(run, [seal(10, 5.0)])
    model = seen(run)["step-10"]
    mlflow = tracking.client(run.uri)
    mlflow.set_logged_model_tags(model.model_id, {NOTE: model.tags[NOTE] + NOTE_LINE + "evaluated", "mine": "1"})
    attempt(run, [seal(10, 5.0), seal(20, 4.0)])
    tags = seen(run)["step-10"].tags
    assert tags[NOTE].startswith("Kept.")
    assert tags[NOTE].endswith(f"{NOTE_LINE}evaluated")
    assert tags["mine"] == "1"


def test_a_model_that_a_person_deleted_comes_not_back_and_keeps_no_other_away(run: Tracking) -> None:
    models = Models(Rest(run.uri), run, print)
    models.show(shown(ROOT, [seal(10, 5.0)], []))
    models.work()
    tracking.client(run.uri).delete_logged_model(seen(run)["step-10"].model_id)
    models.show(shown(ROOT, [seal(10, 5.0), seal(20, 4.0)], []))
    models.work()
    assert marks(run) == {"step-20": {"best", "last"}}


def test_a_server_without_logged_models_is_told_once_and_gets_the_metrics(
    run: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Rest.call

    def older(self: Rest, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if path.startswith("logged-models"):  # this one denies who is no administrator what it does not know
            raise rest._meaning(404, b"Not Found")
        return call(self, method, path, body)

    monkeypatch.setattr(rest.Rest, "call", older)
    said: list[str] = []
    attempt(run, [seal(10, 5.0)], say=said.append)
    assert seen(run) == {}
    assert tracking.client(run.uri).get_run(run.run_id).data.metrics == {"eval/loss": 5.0}
    assert len([line for line in said if "no logged models" in line]) == 1


def test_one_value_that_mlflow_does_not_take_costs_only_that_value(run: Tracking) -> None:
    said: list[str] = []
    tracker = make_tracker(run, said.append)
    for step in range(20):
        tracker.metrics({"train/loss": 1.0, **({"what?": 1.0} if step == 13 else {})}, step)
    assert tracker.close() == []
    mlflow = tracking.client(run.uri)
    assert [point.step for point in mlflow.get_metric_history(run.run_id, "train/loss")] == list(range(20))
    assert len(said) == 1
    assert "refuses what?" in said[0]


def test_a_deleted_run_takes_everything_once_it_is_restored(run: Tracking) -> None:
    mlflow = tracking.client(run.uri)
    mlflow.delete_run(run.run_id)
    said: list[str] = []
    tracker = make_tracker(run, said.append)
    tracker.metrics({"train/loss": 1.0, "train/norm": 2.0}, 1)
    assert not tracker.flush(20)
    mlflow.restore_run(run.run_id)
    assert tracker.close() == []
    assert mlflow.get_run(run.run_id).data.metrics == {"train/loss": 1.0, "train/norm": 2.0}
    assert "takes nothing from this run" in said[0]


def test_a_launcher_tags_the_run_and_waits_for_no_server_that_is_away(run: Tracking) -> None:
    tag_run(run, {"dropforge.idle": "the GPUs of this pod were idle"}, 60)
    assert tracking.client(run.uri).get_run(run.run_id).data.tags["dropforge.idle"] == "the GPUs of this pod were idle"
    tag_run(Tracking("http://127.0.0.1:1", run.run_id, run.experiment_id), {"dropforge.idle": "x"}, 0.1)
    tag_run(None, {"dropforge.idle": "x"}, 60)


def test_what_mlflow_did_not_take_is_sent_once_it_is_back(run: Tracking, tmp_path: Path) -> None:
    mlflow, store = tracking.client(run.uri), FolderStore(tmp_path)
    mlflow.set_tag(run.run_id, tracking.TAG_ATTEMPT, "2")
    mlflow.set_tag(run.run_id, "dropforge.best", "step-2")
    point = {"key": "train/loss", "timestamp": 1_700_000_000_000}
    rows = [{**point, "value": 1.0 / step, "step": step} for step in range(1, 1001)]
    store.put("runs/fam-1/unsent-metrics/2-5.json", json.dumps(rows).encode())
    old, new = {"dropforge.best": "step-1"}, {"dropforge.steps": "1000"}
    store.put("runs/fam-1/unsent-tags/1-4.json", json.dumps({"tags": old, "checkpoints": []}).encode())
    store.put("runs/fam-1/unsent-tags/2-5.json", json.dumps({"tags": new, "checkpoints": [{"step": 2}]}).encode())
    order = {"dropforge.ask": "last register", "dropforge.run": "another-1", "mine": "x"}
    store.put("runs/fam-1/unsent-tags/2-6.json", json.dumps({"tags": order}).encode())
    for sent in (1002, 0):
        assert unsent.send(store, "fam-1", run.uri, run.run_id) == sent
        history = mlflow.get_metric_history(run.run_id, "train/loss")
        assert sorted(item.step for item in history) == list(range(1, 1001))
        tags = mlflow.get_run(run.run_id).data.tags
        assert (tags["dropforge.best"], tags["dropforge.steps"]) == ("step-2", "1000")
        assert not tags.keys() & {"dropforge.ask", "dropforge.run"}  # Airflow's login sends what a training has kept
        left = {info.key: json.loads(store.get(info.key)) for info in store.list("runs/fam-1/")}
        assert left == {"runs/fam-1/unsent-tags/2-5.json": {"tags": {}, "checkpoints": [{"step": 2}]}}


def test_a_file_that_is_odd_or_refused_stays_and_holds_up_no_other(
    run: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pods may write what they like below their run."""
    mlflow, store = tracking.client(run.uri), FolderStore(tmp_path)
    point = {"key": "train/loss", "timestamp": 1_700_000_000_000, "value": 1.0, "step": 1}
    odd: dict[str, Any] = {
        "unsent-metrics/notes": [],
        "unsent-metrics/0-a.json": [],
        "unsent-metrics/0-1.json": [{**point, "more": 1}],
        "unsent-metrics/0-2.json": [{**point, "key": "what?"}],
        "unsent-metrics/0-3.json": {"other": {}},
        "unsent-tags/0-4.json": {"tags": [1]},
        "unsent-tags/0-5.json": {"tags": {"dropforge.steps": 7}},
        "unsent-tags/0-6.json": "tags",
        "unsent-tags/0-7.json": None,
    }
    for name, content in odd.items():
        store.put(f"runs/fam-1/{name}", json.dumps(content).encode())
    store.put("runs/fam-1/unsent-tags/0-8.json", b"[" * 99_000)
    store.put("runs/fam-1/unsent-metrics/0-9.json", b"[" + b"[]," * 200_000 + b"[]]")
    store.put("runs/fam-1/unsent-metrics/1-9.json", json.dumps([point]).encode())
    store.put("runs/fam-1/unsent-tags/1-9.json", json.dumps({"tags": {"dropforge.steps": "7"}}).encode())
    assert unsent.send(store, "fam-1", run.uri, run.run_id) == 2
    found = mlflow.get_run(run.run_id).data
    assert (found.metrics, found.tags["dropforge.steps"]) == ({"train/loss": 1.0}, "7")
    left = {info.key.removeprefix("runs/fam-1/") for info in store.list("runs/fam-1/")}
    assert left == {*odd, "unsent-tags/0-8.json", "unsent-metrics/0-9.json"}
    assert all(name in caplog.text for name in left)
