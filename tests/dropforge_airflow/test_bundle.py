"""What the cluster said of a gang that failed is kept once, before the gang is gone, and named in log and MLflow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from dropforge_airflow.operators import MeteredJobOperator
from dropforge_airflow.tasks import bundle
from kubeflow_training.jobs.observation import Observation, Phase, Reason

from dropforge import layout, tracking
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec, Tracking
from tests.dropforge_airflow.conftest import Yard
from tests.kubeflow_training.conftest import Cluster, cluster, stopped_cluster

__all__ = ["cluster", "stopped_cluster"]  # fixtures
RUN = "fam-1"


@pytest.fixture
def notes(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A run, and what is noted on its MLflow run."""
    recipe = load_recipe("tiny", {})
    spec = RunSpec(RUN, "fam", 1, f"s3://b/runs/{RUN}", "s3://b", "s3://b/m", "d" * 64, recipe.plain(), "code")
    yard.store.put(layout.run_key(RUN), replace(spec, tracking=Tracking("http://x", "m1", "0")).to_json())
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tracking, "note", lambda *given: told.append(given))
    return told


def operator(cluster: Cluster) -> MeteredJobOperator:
    labels = {"dropforge/run": RUN, "dropforge/family": "fam", "dropforge/purpose": "train"}
    noted = {"labels": labels, "annotations": {"dropforge/run-folder": f"s3://b/runs/{RUN}/"}}
    found = MeteredJobOperator(task_id="train", manifest={"metadata": noted}, backend="local")
    found.home = str(cluster.home)
    return found


def failed(cluster: Cluster) -> tuple[dict[str, Any], Observation]:
    made = cluster.submit("import sys; print('no data'); sys.exit(11)")
    seen = cluster.ended()
    assert seen.reason is Reason.BAD_DATA
    return {"name": "job", "namespace": "default", "uid": made.uid, "gang": 1, "backend": "local"}, seen


def test_a_failed_gang_is_kept_once_and_named(
    yard: Yard, notes: list[tuple[Any, ...]], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job, seen = failed(cluster)
    train = operator(cluster)
    for _ in range(2):  # an end may be seen twice
        train.gang_ended(job, seen)
    where = f"s3://b/runs/{RUN}/failures/{job['uid']}.json"
    assert capsys.readouterr().out.count(f"is kept: {where}") == 1
    found = json.loads(yard.store.get(layout.failure_key(RUN, job["uid"])))
    assert Observation.from_dict(found["observation"]) == seen
    assert found["job"]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    (pod,) = found["pods"]
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 11
    assert (pod["log"], pod["traces"]) == ("logs/job-master-0/", "failures/job-master-0/")
    assert "spec" not in pod
    assert {run for _, run, _, _ in notes} == {"m1"}
    told = {tag: text for _, _, tag, text in notes}
    assert told.pop("dropforge.failure").startswith(f"{where} attempt 1: bad data: rank 0")
    assert told == {"dropforge.causes": "bad data", "dropforge.lost_steps": "unknown"}  # it told of no step


def test_what_mlflow_did_not_take_is_there_when_the_run_ends(
    yard: Yard, notes: list[tuple[Any, ...]], cluster: Cluster, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away while the failure was seen."""

    def away(*_: object) -> None:
        raise ConnectionError("MLflow is away")

    spec = RunSpec.read(yard.store, layout.run_key(RUN))
    opened = replace(spec, tracking=tracking.open_run(mlflow_server, replace(spec, tracking=None), {}, {}))
    yard.store.put(layout.run_key(RUN), opened.to_json())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    assert bundle.unlinked(yard.store, opened) == {}
    monkeypatch.setattr(tracking, "note", away)
    job, seen = failed(cluster)
    operator(cluster).gang_ended(job, seen)
    told = bundle.unlinked(yard.store, opened)
    assert told.pop(tracking.TAG_FAILURE) == f"s3://b/runs/{RUN}/failures/{job['uid']}.json attempt 1: bad data"
    assert told == {tracking.TAG_CAUSES: "bad data", tracking.TAG_LOST: "unknown"}
    assert opened.tracking is not None
    tracking.client(mlflow_server).set_tag(opened.tracking.run_id, tracking.TAG_FAILURE, "known")
    assert tracking.TAG_FAILURE not in bundle.unlinked(yard.store, opened)


def test_what_did_not_fail_leaves_nothing(yard: Yard, notes: list[tuple[Any, ...]], cluster: Cluster) -> None:
    job, seen = failed(cluster)
    operator(cluster).gang_ended(job, replace(seen, phase=Phase.SUCCEEDED, reason=None))
    operator(cluster).gang_ended(job, replace(seen, phase=Phase.CANCELLED))
    assert yard.store.stat(layout.failure_key(RUN, job["uid"])) is None
    assert not notes


def test_a_gang_that_is_gone_leaves_what_was_seen_of_it(
    yard: Yard, notes: list[tuple[Any, ...]], cluster: Cluster
) -> None:
    job, seen = failed(cluster)
    operator(cluster).gang_ended({**job, "uid": "another"}, seen)  # its name is a later gang's
    found = json.loads(yard.store.get(layout.failure_key(RUN, "another")))
    assert (found["job"], found["pods"]) == (None, [])
    assert found["observation"]["exit_code"] == 11


def test_what_cannot_be_kept_fails_nothing(
    yard: Yard, notes: list[tuple[Any, ...]], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job, seen = failed(cluster)
    train = operator(cluster)
    train.gang_ended({**job, "backend": "nowhere"}, seen)
    assert "could not be kept" in capsys.readouterr().out
    assert not notes
