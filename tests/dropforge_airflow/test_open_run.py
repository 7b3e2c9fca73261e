"""`open_run` leaves no MLflow run behind that seems to go on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.plan import Plan
from dropforge_airflow.tasks.run import open_run

from dropforge import layout, tracking
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from tests.dropforge_airflow.conftest import Yard

PLAN = Plan(family="fam", drop="d1", drop_id="0" * 32, counter=1, recipe=load_recipe("tiny").plain())
CURATED = Curated(digest="ab" * 32, manifest="s3://b/m.json", card="", rows={"train": 9, "eval": 1})


def test_a_run_whose_folder_cannot_be_written_has_failed_and_is_opened_again(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("DROPFORGE_BUCKET", "no-such-bucket")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        open_run(PLAN, CURATED, "dag-run-1")
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
