"""`dropforge.Client` with a real MLflow, a real S3, and answers of Airflow as each test sets them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from kubeflow_training.jobs.local.capacity import Resources

from dropforge import Client, layout, ledger
from dropforge.client import DataError, DropforgeError, NotTakenError, RecipeError, RunFailedError, StillRunningError
from dropforge.client.airflow import Airflow
from dropforge.client.connection import Connection
from dropforge.drop import read_drop
from dropforge.recipes.load import parse_recipe, read_yaml
from dropforge.settings import from_env
from dropforge.store import S3Store, s3_client
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal, airflow, terminal
from tests.dropforge.cli.test_result import Registry, registry

__all__ = ["airflow", "registry", "terminal"]


@pytest.fixture
def client(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.delenv("DROPFORGE_STATE", raising=False)
    return Client()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two three"}\n')
    return path


def take(store: S3Store, name: str, dag_run: str) -> None:
    """Do what intake and plan do with a drop."""
    drop = read_drop(store, "fam", name, store.bucket)
    ledger.record(store, drop)
    ledger.claim(store, "fam", drop.id, dag_run)


def test_a_drop_gives_the_run_that_takes_it(
    client: Client, airflow: FakeAirflow, s3_store: S3Store, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropforge.client.named._TAKEN", 0.1)
    sent: list[int] = []
    recipe = {"extends": "tiny", "train": {"max_steps": 3}}
    run = client.drop(rows, "fam", recipe=recipe, name="one", on_upload=sent.append)
    assert sum(sent) > rows.stat().st_size
    assert b'"max_steps": 3' in s3_store.get(layout.drop_prefix("fam", "one") + layout.RECIPE)
    assert run.name == "fam/one"
    assert run.state == "queued"
    assert (run.dag_run, run.airflow_page, run.metrics, run.verdict, run.promoted) == ("", "", {}, "", False)
    for waited in (run, client.run("fam/one")):
        with pytest.raises(StillRunningError, match="no run has taken its drop within 0 s"):
            waited.wait(timeout=0)
    monkeypatch.setattr("dropforge.client.run._TAKEN", 0.1)
    with pytest.raises(NotTakenError, match="no run took it"):
        run.wait()
    with pytest.raises(DataError, match="it has not begun"):
        client.compare(run, "other")

    take(s3_store, "one", "manual__1")
    airflow.add(DagRun("manual__1", "running", ("success", "running"), ends_at_look=3))
    assert run.state == "running"
    seen: list[str] = []
    assert run.wait(on_progress=lambda view: seen.append(view.state), poll=0.01) is run
    assert seen == ["running", "success"]
    assert run.airflow_page.endswith("/dags/dropforge_finetune/runs/manual__1")
    assert (run.metrics, run.verdict, run.promoted) == ({}, "", False)
    with pytest.raises(DataError, match="it has registered no model"):
        run.model.load()

    again = client.drop(rows, "fam", recipe=recipe, name="two")
    assert (again.name, again.dag_run) == ("fam/one", "manual__1")
    assert client.drop(rows, "fam", recipe=recipe, name="three", again=True).dag_run == airflow.submitted.name


def test_a_base_that_the_stack_does_not_let_be_read_is_refused_before_the_upload(
    client: Client, s3_store: S3Store, rows: Path, tmp_path: Path
) -> None:
    recipe = {"extends": "lora", "base": {"model": str(tmp_path / "models" / "small")}}
    elsewhere = {"extends": "lora", "base": {"model": "s3://others/small"}}
    alone = replace(client.connection.settings, self_service=True)
    client.connection = client.connection._replace(settings=alone, stack=tmp_path, readable="")
    for refused in (recipe, elsewhere):
        with pytest.raises(RecipeError, match=r"`base.model`: .*not among what recipes may have read.*hub:\*"):
            client.drop(rows, "fam", recipe=refused, name="one")
    assert list(s3_store.list(layout.DROPS)) == []
    client.connection = client.connection._replace(readable=f"hub:* {tmp_path}/models/ s3://others/")
    for number, allowed in enumerate((recipe, elsewhere)):
        client.drop(rows, "fam", recipe=allowed, name=f"allowed-{number}")


def test_what_cannot_work_uploads_nothing(client: Client, s3_store: S3Store, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="learning_rate"):
        client.drop(rows, "fam", recipe={"extends": "tiny", "train": {"learning_rte": 1}})
    for recipe in ({"extends": Path("tiny")}, {"extends": "tiny", "train": {"learning_rate": float("nan")}}):
        with pytest.raises(RecipeError, match="cannot be written as YAML"):
            client.drop(rows, "fam", recipe=recipe)
    with pytest.raises(RecipeError, match=r"recipe nowhere.yaml: there is no such file"):
        client.drop(rows, "fam", recipe="nowhere.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data file"):
        client.drop(tmp_path / "empty", "fam")
    assert list(s3_store.list()) == []


def test_a_run_that_fails_or_takes_longer_says_so(client: Client, airflow: FakeAirflow) -> None:
    airflow.add(DagRun("manual__1", "failed", ("success", "failed"), "no row can be read"))
    with pytest.raises(RunFailedError, match="curate failed: no row can be read"):
        client.run("manual__1").wait()
    airflow.add(DagRun("manual__3", "success", ("success",) * 3))
    run = client.run("manual__3")
    airflow.away = 2  # as behind a proxy whose service is restarted
    assert run.wait(poll=0.01) is run
    airflow.add(DagRun("manual__2", "running", ("success", "running")))
    with pytest.raises(StillRunningError, match="not ended within 0 s"):
        client.run("manual__2").wait(timeout=0, poll=0.01)


def test_a_result_names_its_version_and_whether_it_was_promoted(client: Client, registry: Registry) -> None:
    first = client.run(registry.add_run("promote: it is the first", promote=True))
    second = client.run(registry.add_run("keep champion: worse by 54 %", promote=False))
    assert (first.promoted, second.promoted) == (True, False)
    assert second.verdict == "keep champion: worse by 54 %"
    assert second.model.uri == f"models:/{registry.family}/2"
    assert client.model(f"{registry.family}@champion") == first.model
    assert client.model(f"{registry.family}/2") == second.model
    for word in (f"{registry.family}@other", f"{registry.family}/3", registry.family):
        with pytest.raises(DataError, match=f"model {word}"):
            client.model(word)
    assert {run.version for run in client.runs(registry.family)} == {"1", "2"}

    comparison = client.compare(first, f"{registry.family}/2")
    assert [run.version for run in comparison.runs] == ["1", "2"]


def test_a_stack_that_is_named_is_no_other(client: Client, tmp_path: Path) -> None:
    with pytest.raises(DropforgeError, match="it is not running"):  # the environment names services of its own
        Client(tmp_path / "misspelled")


def test_a_recipe_s_texts_stay_texts(client: Client, s3_store: S3Store, rows: Path) -> None:
    names = ["0123e45"]
    recipe = {"extends": "tiny", "data": {"text_column": "1e3", "keep_columns": names}, "curation": {"prefer": names}}
    client.drop(rows, "fam", recipe=recipe, name="one")
    assert read_yaml(s3_store.get(layout.drop_prefix("fam", "one") + layout.RECIPE)) == recipe


def test_s3_that_does_not_answer_is_no_run_that_waits(
    client: Client, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = client.drop(rows, "fam", name="one")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    cast(Any, client.connection.store).client = s3_client(hurried=True)
    with pytest.raises(DropforgeError, match="S3 does not answer"):
        assert run.state


def test_importing_it_costs_a_rank_nothing() -> None:
    code = "import dropforge, sys; print([name for name in sys.modules if name.startswith(('dropforge.', 'pydantic'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_stacks_machine_can_never_give_is_refused_before_an_upload(
    s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubeflow_training.jobs.local.LocalCluster.offers", lambda _: Resources(2, 8e9, 0))
    settings = from_env({"DROPFORGE_BUCKET": s3_store.bucket, "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"})
    connection = Connection(settings, s3_store, Airflow("", "", ""), tmp_path, f"hub:* {tmp_path}/")
    connection.check_recipe("fam", parse_recipe("extends: tiny"))
    with pytest.raises(RecipeError, match="2 cpus too few"):
        connection.check_recipe("fam", parse_recipe("extends: tiny\ncompute: {cpus: 4}"))
    with pytest.raises(RecipeError, match=r"has no config\.json"):
        connection.check_recipe("fam", parse_recipe(f"extends: lora\nbase: {{model: {tmp_path}/none}}"))
