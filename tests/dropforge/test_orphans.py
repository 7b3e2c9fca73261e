"""Runs that were left open in a real MLflow end as their DAG runs did; others are left alone."""

from __future__ import annotations

import uuid

import pytest

from dropforge import orphans, tracking
from dropforge.orphans import close_orphans


def test_open_runs_end_as_their_dag_runs_did_and_no_others(mlflow_server: str) -> None:
    mlflow = tracking.client(mlflow_server)
    family = f"fam-{uuid.uuid4().hex[:8]}"
    experiment = mlflow.create_experiment(family)
    states = {"over": "failed", "done": "success", "at-work": "running", "elsewhere": None, "": "failed"}
    made = {
        dag_run: mlflow.create_run(experiment, tags={tracking.TAG_DAG_RUN: dag_run, tracking.TAG_RUN: f"{family}-{n}"})
        for n, dag_run in enumerate(states)
    }
    by_hand = mlflow.create_run(experiment)  # as `python -m trainer run` opens one
    killed = mlflow.create_run(experiment, tags={tracking.TAG_DAG_RUN: "over"})
    mlflow.set_terminated(killed.info.run_id, "KILLED")

    def status(run_id: str) -> str:
        return str(mlflow.get_run(run_id).info.status)

    assert sorted(close_orphans(mlflow_server, states.get)) == [f"{family}-0", f"{family}-1"]
    found = {dag_run: status(run.info.run_id) for dag_run, run in made.items()}
    assert found == {"over": "FAILED", "done": "FINISHED", "at-work": "RUNNING", "elsewhere": "RUNNING", "": "RUNNING"}
    assert (status(by_hand.info.run_id), status(killed.info.run_id)) == ("RUNNING", "KILLED")
    assert mlflow.get_run(made["over"].info.run_id).data.tags[tracking.TAG_ENDED_BY] == "reaper"
    assert close_orphans(mlflow_server, states.get) == []


def test_more_open_runs_than_one_answer_holds_are_all_ended(
    mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_PAGE", 2)
    mlflow = tracking.client(mlflow_server)
    name = uuid.uuid4().hex
    experiment = mlflow.create_experiment(f"fam-{name[:8]}")
    for n in range(5):
        mlflow.create_run(experiment, tags={tracking.TAG_DAG_RUN: name, tracking.TAG_RUN: str(n)})
    assert sorted(close_orphans(mlflow_server, {name: "failed"}.get)) == list("01234")
