"""A plan asks the hub once, and what the hub refuses ends there."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.api.datamodels._generated import DagRunType
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow import connection
from dropforge_airflow.run_notes import FAILURE
from dropforge_airflow.tasks import retrain, sweep
from dropforge_airflow.tasks.failure import no_retry

from dropforge import hub as hub_models
from dropforge.errors import RecipeError
from dropforge.hub import Pinned, UnreachableError
from dropforge.store import Store
from dropforge.sweep import build_sweep
from tests.dropforge_airflow.test_plan import entered, plan
from tests.hub_server import Hub, open_hub

MODEL = "some/model"
RECIPE = f"extends: lora\nbase: {{model: {MODEL}}}\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    made.model(MODEL, {"config.json": b"{}", "model.safetensors": b"weights"})
    with open_hub(made, tmp_path / "cache", monkeypatch):
        yield made


def asked(store: Store, recipe: str = RECIPE) -> dict[str, Any]:
    found: dict[str, Any] = plan(store, entered(store, recipe=recipe))["recipe"]["base"]
    return found


def test_the_plan_has_the_commit_that_the_branch_pointed_to(hub: Hub, store: Store) -> None:
    first = hub.repositories[MODEL].refs["main"]
    assert asked(store)["revision"] == first
    hub.repositories[MODEL].refs["old"] = first
    hub.repositories[MODEL].commit({"config.json": b"{}", "model.safetensors": b"others"})
    again = {"overrides": {"base": {"revision": "old"}}, "drop": "fam/d1", "again": True}
    assert plan(store, None, owner="run-2", **again)["recipe"]["base"]["revision"] == first


@pytest.mark.parametrize(
    ("allowed", "base"),
    [("s3://models/", {"model": MODEL}), ("hub:some/*", {"model": MODEL, "revision": "refs/pr/5"})],
)
def test_a_base_that_may_not_be_read_is_asked_for_neither_by_a_sweep_nor_by_the_calendar(
    store: Store, monkeypatch: pytest.MonkeyPatch, allowed: str, base: dict[str, str]
) -> None:
    """The hub is asked with the installation's token."""
    asked_for: list[str] = []

    def pin(model: str, *_: object) -> Pinned:
        asked_for.append(model)
        return Pinned("a" * 40, "the hub")

    monkeypatch.setattr(hub_models, "pin", pin)
    monkeypatch.setattr(connection, "open_store", lambda _: store)
    for name, value in {"BUCKET": "b", "READABLE": allowed}.items():
        monkeypatch.setenv(f"DROPFORGE_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    recipe = {"extends": "lora", "base": base}
    trials = build_sweep({"recipe": recipe, "space": {"train.seed": [1, 2]}})
    drop = entered(store)
    with pytest.raises(RecipeError, match=r"`base\.model`.*May be read"):
        sweep.settle(store, "b", trials, {"family": "fam", "drop": drop.id}, "sweep-1")
    at = SimpleNamespace(run_type="scheduled", logical_date=None)
    with pytest.raises(AirflowFailException, match=r"`base\.model`.*May be read"):
        retrain.look("fam", {"cron": "0 3 * * *", "recipe": recipe}, {}, at, SimpleNamespace(dag_id="cal"), "run-1")
    assert not asked_for


@pytest.mark.parametrize("run_type", [DagRunType.BACKFILL, DagRunType.MANUAL])
def test_a_retrain_of_the_past_is_refused_and_one_of_now_is_not(run_type: DagRunType) -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    with pytest.raises(AirflowFailException, match="the champion of now"):
        retrain.refuse_past(run_type, now - timedelta(days=9), now)
    retrain.refuse_past(DagRunType.SCHEDULED, now - timedelta(days=9), now)
    retrain.refuse_past(DagRunType.MANUAL, now, now)


@pytest.mark.parametrize(
    ("recipe", "cause"),
    [
        (RECIPE.replace(MODEL, "some/other"), "the hub has no some/other"),
        (RECIPE.replace(MODEL, f"{MODEL}, revision: v9"), "the hub has no some/model at v9"),
    ],
)
def test_what_the_hub_has_not_is_refused_before_anything_starts(
    hub: Hub, store: Store, recipe: str, cause: str
) -> None:
    with pytest.raises(RecipeError, match=cause):
        asked(store, recipe)


LARGE = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 11008, "vocab_size": 32000}  # fmt: skip


def test_a_model_that_its_pod_cannot_hold_is_refused_by_its_config(
    hub: Hub, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[MODEL].commit({"config.json": json.dumps(LARGE).encode(), "model.safetensors": b"weights"})
    with pytest.raises(RecipeError, match=r"`compute.memory_gb`: a pod of \d+ GB is too small"):
        asked(store, f"{RECIPE}compute: {{memory_gb: 4}}\n")

    def read_only(*_: Any, **__: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", read_only)
    caplog.set_level("INFO")
    asked(store, f"{RECIPE}compute: {{memory_gb: 4}}\n")  # what nobody knows refuses nothing
    assert "Memory of a rank stays unknown" in caplog.text


def test_a_gate_ends_the_task_and_a_silence_has_it_try_again(hub: Hub, store: Store) -> None:
    hub.repositories[MODEL].gate = "hf_right"
    with pytest.raises(AirflowFailException, match="accepted its terms"), no_retry():
        asked(store)
    hub.status = 503
    with pytest.raises(UnreachableError, match="the hub does not answer"), no_retry():
        asked(store)


class Instance:
    """A task instance that keeps what is pushed."""

    def __init__(self) -> None:
        self.try_number, self.pushed = 1, dict[str, str]()

    def xcom_push(self, key: str, value: str) -> None:
        self.pushed[key] = value


def test_a_hub_whose_name_nobody_knows_is_tried_once_more_alone(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    ti = Instance()
    monkeypatch.setattr("dropforge_airflow.tasks.failure.get_current_context", lambda: {"ti": ti})
    hub.status = 503
    ti.try_number = 2
    with pytest.raises(UnreachableError), no_retry():
        asked(store)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid")
    for ti.try_number, kind in ((1, UnreachableError), (2, AirflowFailException)):
        ti.pushed.clear()
        with pytest.raises(kind, match=rf"base model {MODEL}: the hub does not answer .*S3 .*`base.model`"), no_retry():
            asked(store)
        assert MODEL in ti.pushed[FAILURE]  # the run's note, if it was the last try
