"""The page of a family: its ledger in a bucket, its versions in a real MLflow, and what became of each drop."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.pages import ledgers

from dropforge import intake_ledger, layout, ledger, sweep_tracking, sweeps, tracking
from dropforge.drop import Drop, DropFile
from dropforge.store import S3Store
from tests.dropforge_airflow.pages.conftest import Server


def enter(store: S3Store, family: str, name: str) -> Drop:
    file = DropFile(key="a.jsonl", size=1000, content=f"sha256:{name}", etag="e")
    drop = Drop(family=family, drop=name, id=uuid.uuid4().hex, bucket=store.bucket, files=(file,))
    assert ledger.record(store, drop)
    return drop


def page(server: Server, family: str | None = None) -> Any:
    answer = server.get(f"/dags/{FINETUNE_DAG}/family.json", **({} if family is None else {"family": family}))
    assert answer.status_code == 200
    return answer.json()


@pytest.fixture
def family() -> str:
    return f"fam-{uuid.uuid4().hex[:8]}"


def test_no_family_yet(server: Server, bucket: S3Store) -> None:
    found = page(server)
    assert (found["families"], found["family"], found["unseen"]) == ([], "", [])


def test_what_became_of_each_drop(
    server: Server, bucket: S3Store, mlflow_server: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    mlflow = tracking.client(mlflow_server)
    taken, _, lost = (enter(bucket, family, name) for name in ("taken", "waiting", "lost"))
    dag_run, again = server.run(f"asset__{uuid.uuid4().hex}", state="success"), f"gone__{uuid.uuid4().hex}"
    ledger.claim(bucket, family, taken.id, dag_run)
    ledger.claim(bucket, family, lost.id, again)
    bucket.put(layout.refused_key(family, "broken"), json.dumps({"reason": "rows.jsonl is <b>torn</b>"}).encode())
    experiment = mlflow.create_experiment(family)
    tags = {tracking.TAG_DAG_RUN: dag_run, tracking.TAG_RUN: f"{family}-1", tracking.TAG_VERDICT: "promote: better"}
    run = mlflow.create_run(experiment, tags=tags | {tracking.TAG_VERSION: "2"}).info.run_id
    mlflow.log_metric(run, "eval/loss", 1.5, step=10)
    mlflow.create_registered_model(family)
    for _ in range(2):
        mlflow.create_model_version(family, source=f"{bucket.uri}/runs/x", run_id=run, tags={tracking.TAG_RUN: "x-1"})
    mlflow.set_registered_model_alias(family, "champion", "2")

    found = page(server, family)
    assert found["families"] == [family]
    assert [(item["number"], item["aliases"]) for item in found["versions"]] == [("2", ["champion"]), ("1", [])]
    drops = {item["name"]: item for item in found["drops"]}
    assert set(drops) == {"taken", "waiting", "lost"}
    assert (drops["waiting"]["waits"], drops["waiting"]["takers"]) == (True, [])
    (taker,) = drops["taken"]["takers"]
    assert (taker["dag_run"], taker["state"]) == (dag_run, "success")
    assert (taker["run"]["version"], taker["run"]["loss"], taker["run"]["verdict"]) == ("2", 1.5, "promote: better")
    assert drops["lost"]["takers"] == [{"dag_run": again, "state": "", "run": None}]
    assert [(item["name"], item["why"]) for item in found["refused"]] == [("broken", "rows.jsonl is <b>torn</b>")]
    assert found["unseen"] == []


def test_of_a_sweep_only_the_best_trial_is_beside_it(
    server: Server, bucket: S3Store, mlflow_server: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    mlflow, sweep = tracking.client(mlflow_server), f"sweep__{family}__1"
    drop = enter(bucket, family, "one")
    ledger.claim(bucket, family, drop.id, sweeps.candidate_run(sweep))
    parent, experiment = sweep_tracking.open_parent(mlflow_server, family, sweep, {}, {})
    for trial, dag_run in enumerate([sweeps.trial_run(sweep, 0), sweeps.candidate_run(sweep)]):
        by = sweeps.Member(by=sweep, parent=parent, trial=trial, candidate=False)
        tags = {tracking.TAG_RUN: f"t{trial}", tracking.TAG_DAG_RUN: dag_run, **sweep_tracking.trial_tags(by)}
        mlflow.create_run(experiment, tags=tags)
    found = page(server, family)
    assert [(run["run"], run["dag_run"]) for run in found["runs"]] == [("t1", sweeps.candidate_run(sweep)), (sweep, "")]
    assert found["drops"][0]["takers"][0]["run"]["run"] == "t1"


def test_drops_that_a_family_s_rules_hold_pass_over_or_gather(server: Server, bucket: S3Store, family: str) -> None:
    held, old, part, batch = (enter(bucket, family, name) for name in ("held", "old", "part", "batch"))
    bucket.put(layout.pending_key(family, held.id), json.dumps({"drop": "held", "held": "1 per hour"}).encode())
    intake_ledger.supersede(bucket, family, old.id, "old", "drop held is newer")
    ledger.claim(bucket, family, part.id, f"batch {batch.id}", note={"batch": batch.id})
    drops = {item["name"]: item for item in page(server, family)["drops"]}
    assert (drops["held"]["waits"], drops["held"]["why"]) == (True, "1 per hour")
    assert (drops["old"]["waits"], drops["old"]["takers"], drops["old"]["why"]) == (False, [], "drop held is newer")
    assert drops["part"]["takers"] == []
    ledger.claim(bucket, family, batch.id, "asset__batch")
    found = ledgers.read(bucket, family)
    assert {item.name: item.takers for item in found.entered}["part"] == ("asset__batch",)


def test_a_family_that_is_known_to_nobody_and_names_that_are_none(server: Server, bucket: S3Store) -> None:
    found = page(server, "unknown")
    assert (found["drops"], found["versions"]) == ([], [])
    assert [item["what"] for item in found["unseen"]] == ["MLflow"]
    for name in ("../drops", "a/b", "A", "x" * 41, "-", "a' OR 'a", "drops/../x"):
        assert server.get(f"/dags/{FINETUNE_DAG}/family.json", family=name).status_code == 422, name


def test_a_large_family_is_cut_and_broken_entries_are_borne(server: Server, bucket: S3Store, family: str) -> None:
    for number in range(ledgers.SHOWN + 5):
        bucket.put(layout.ledger_key(family, f"{number:032x}"), b"no JSON")
    bucket.put("ledger/drops/NOT-A-FAMILY/x.json", b"{}")
    found = page(server, family)
    assert len(found["drops"]) == ledgers.SHOWN
    assert found["more_drops"] == 5
    assert {item["name"] for item in found["drops"]} == {""}
    assert found["families"] == [family]
