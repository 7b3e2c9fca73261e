"""`open_run` leaves no MLflow run behind that seems to go on, and reopens none that others have finished."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from dropforge_airflow.operators import OpenRunOperator
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.plan import Plan
from dropforge_airflow.tasks.run import NothingNew, open_run

from dropforge import layout, sweeps, tracking
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from dropforge.stages import NOTHING_NEW
from dropforge.store import S3Store
from tests.dropforge_airflow.conftest import Yard

PLAN = Plan(family="fam", drop="d1", drop_id="0" * 32, counter=1, recipe=load_recipe("tiny").plain())
CURATED = Curated(digest="ab" * 32, manifest="s3://b/m.json", card="", rows={"train": 9, "eval": 1})


def test_a_run_whose_folder_cannot_be_written_has_failed_and_is_opened_again(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    write = S3Store.put

    def refuse(store: S3Store, key: str, data: bytes) -> None:
        if key.startswith(layout.RUNS):
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "PutObject")
        write(store, key, data)

    monkeypatch.setattr(S3Store, "put", refuse)
    with pytest.raises(ClientError, match="AccessDenied"):
        open_run(PLAN, CURATED, "dag-run-1")
    monkeypatch.setattr(S3Store, "put", write)
    mlflow = tracking.client(address)
    (failed,) = tracking.search(mlflow, tracking.TAG_RUN)
    assert failed.info.status == "FAILED"

    monkeypatch.setenv("DROPFORGE_BUCKET", yard.bucket)
    opened = open_run(PLAN, CURATED, "dag-run-1")
    (found,) = tracking.search(mlflow, tracking.TAG_RUN)
    assert (found.info.run_id, found.info.status) == (opened["mlflow_run"], "RUNNING")
    assert found.info.run_id == failed.info.run_id
    assert opened["mlflow_url"].endswith(f"/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}")
    spec = RunSpec.from_json(yard.store.get(layout.run_key(opened["run"])))
    assert spec.tracking is not None
    assert spec.tracking.run_id == opened["mlflow_run"]
    # The digest is kept in each place where the run's pods do not write.
    manifests = [opened[name]["metadata"]["annotations"]["dropforge/run-digest"] for name in ("train", "evaluate")]  # type: ignore[literal-required]
    digest = hashlib.sha256(yard.store.get(layout.run_key(opened["run"]))).hexdigest()
    assert {opened["run_digest"], found.data.tags["dropforge.run_digest"], *manifests} == {digest}


def test_two_that_come_to_the_same_rows_at_once_open_two_runs(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    ti = SimpleNamespace(dag_id="dropforge_finetune", get_dagrun_state=lambda dag, run: "running")
    really, take = tracking.open_run, S3Store.put_if_absent
    named: dict[str, str] = {}
    came = threading.Event()

    def second() -> None:
        try:
            named["b"] = open_run(Plan(**{**PLAN, "drop_id": "1" * 32}), CURATED, "b", ti=ti)["run"]
        finally:
            came.set()

    other = threading.Thread(target=second)

    def put(store: S3Store, key: str, data: bytes) -> bool:
        taken = take(store, key, data)
        if other.is_alive() and not taken:
            came.set()
        return taken

    def slowly(*words: Any) -> Any:
        if other.ident is None:
            other.start()
            assert came.wait(60)
        return really(*words)

    monkeypatch.setattr(S3Store, "put_if_absent", put)
    monkeypatch.setattr(tracking, "open_run", slowly)
    named["a"] = open_run(PLAN, CURATED, "a", ti=ti)["run"]
    other.join(60)
    assert named["b"].endswith("-2"), named
    assert yard.store.stat(layout.opening_key("fam")) is None


def test_a_run_that_others_have_finished_and_registered_stays_as_it_is(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop of the same rows, whose recipe differs by a comment, is another one that comes to the same run."""
    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    opened = open_run(PLAN, CURATED, "first")
    mlflow = tracking.client(address)
    mlflow.create_registered_model("fam")
    mlflow.create_model_version("fam", "s3://b/model", opened["mlflow_run"], tags={tracking.TAG_RUN: opened["run"]})

    def run_json() -> bytes:
        return yard.store.get(layout.run_key(opened["run"]))

    def seen() -> tuple[Any, ...]:
        run = mlflow.get_run(opened["mlflow_run"])
        return dict(run.info), run.data.to_dictionary()

    second = Plan(**{**PLAN, "drop": "d2", "drop_id": "1" * 32})
    # Neither a run that goes on, nor one that failed, nor a trial, which is finished without a version, is over.
    for status in ("RUNNING", "FAILED", "FINISHED"):
        mlflow.update_run(opened["mlflow_run"], status=status)
        assert open_run(PLAN, CURATED, f"after-{status}")["run"] == opened["run"]
    # But one for which another run of Airflow is running is left to it.
    states = {"after-FINISHED": "running"}
    ti = SimpleNamespace(dag_id="dropforge_finetune", get_dagrun_state=lambda dag, run: states[run])
    before = seen(), run_json()
    (beside,) = {open_run(second, CURATED, "beside", ti=ti)["run"] for _ in range(2)}  # and is found again
    assert beside.endswith("-2")
    assert (seen(), run_json()) == before
    states["after-FINISHED"] = "failed"
    for run in ("after-it", "after-FINISHED"):
        states[run] = "failed"
        assert open_run(PLAN, CURATED, run, ti=ti)["run"] == opened["run"]
    mlflow.set_tag(opened["mlflow_run"], tracking.TAG_VERSION, "1")
    mlflow.set_terminated(opened["mlflow_run"], "FINISHED")

    before = seen(), run_json()
    yard.store.put(layout.in_flight_key("fam", "1" * 32), b"{}")
    yard.store.put(layout.claim_key("fam", "1" * 32, 1), b'{"owner": "second", "counter": 1}')
    left: dict[str, Any] = {}
    context: Any = {
        "run_id": "second",
        "dag_run": SimpleNamespace(partition_key=f"b/fam/d2/{'1' * 32}"),
        "ti": SimpleNamespace(xcom_push=lambda key, value: left.update({key: value})),
    }
    with pytest.raises(NothingNew, match=f"as run {opened['run']}, version 1"):
        OpenRunOperator(task_id="open_run", planned=second, curated=CURATED, forecast=None).execute(context)
    found = left[NOTHING_NEW]
    assert (found["run"], found["version"], found["mlflow_run"]) == (opened["run"], "1", opened["mlflow_run"])
    assert left["mlflow_url"] == opened["mlflow_url"]
    assert yard.store.stat(layout.in_flight_key("fam", "1" * 32)) is None
    assert (seen(), run_json()) == before

    # Who insists, as a retrain does, and a sweep's trial train under the next free number, and find that again.
    for more in ({"again": True}, {"sweep": sweeps.Member(by="s", parent="p", trial=1, candidate=False)}):
        asked = Plan(**{**second, **more})
        for _ in range(2):
            assert open_run(asked, CURATED, "third")["run"] == beside
    assert (seen(), run_json()) == before
    assert (
        open_run(PLAN, CURATED, "after-FINISHED")["mlflow_run"] == opened["mlflow_run"]
    )  # its own, which somebody cleared
    mlflow.set_terminated(opened["mlflow_run"], "FINISHED")
    mlflow.delete_model_version("fam", "1")
    assert open_run(second, CURATED, "second")["mlflow_run"] == opened["mlflow_run"]  # it has no model any more
