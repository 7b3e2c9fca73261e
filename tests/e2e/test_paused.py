"""A fine-tune DAG that is paused loses no drop, and a family's window makes one run of those that came meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropforge import layout, ledger
from dropforge.client.airflow import FINETUNE, INTAKE
from dropforge.client.drops import wait_for_run
from dropforge.run import RunSpec
from tests.e2e.harness import Stack, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILY = "gathered"  # whose file is in conftest.py


def test_drops_for_a_paused_dag_become_one_run_when_it_goes_on(
    stack: Stack, samples: dict[int, dict[str, Path]]
) -> None:
    airflow, store = stack.connection.airflow, stack.connection.store
    before = {run["dag_run_id"] for run in airflow.newest_runs(FINETUNE, 100)}
    airflow._call("PATCH", f"/api/v2/dags/{FINETUNE}", json={"is_paused": True})
    try:
        drops = [stack.drop(FAMILY, name, samples[part], None) for name, part in (("one", 1), ("two", 2))]
        pending = [layout.pending_key(FAMILY, drop.id) for drop in drops]
        wait("both drops in the ledger", lambda: all(store.stat(key) for key in pending))
        # Intake is woken for what waits, and announces nothing to a DAG that would not hear it.
        seen = {run["dag_run_id"] for run in airflow.newest_runs(INTAKE, 100)}
        woken = wait(
            "an intake that was woken",
            lambda: [
                run["dag_run_id"]
                for run in airflow.newest_runs(INTAKE, 20)
                if run["dag_run_id"] not in seen and run["state"] == "success"
            ],
        )
        assert {task["state"] for task in airflow.task_states(INTAKE, woken[0])} == {"skipped"}
        assert {run["dag_run_id"] for run in airflow.newest_runs(FINETUNE, 100)} == before
    finally:
        airflow._call("PATCH", f"/api/v2/dags/{FINETUNE}", json={"is_paused": False})
    runs = {wait_for_run(stack.connection, drop, 240) for drop in drops}
    (run,) = runs
    (tracked,) = wait("its MLflow run", lambda: stack.tracked(run))
    opened = f"runs/{tracked.data.tags['dropforge.run']}/run.json"
    wait("its run.json", lambda: store.stat(opened))
    stack.cancel(run)  # what it trains on is known
    assert {one["dag_run_id"] for one in airflow.newest_runs(FINETUNE, 100)} - before == {run}
    named = [f"{drop.drop} ({drop.id})" for drop in drops]
    assert sorted(tracked.data.tags["dropforge.drops"].split(", ")) == sorted(named)
    spec = RunSpec.from_json(store.get(opened))
    assert spec.recipe["evaluate"]["max_rows"] == 40  # the family's recipe
    assert not {drop.id for drop in drops} & {drop_id for _, drop_id in ledger.pending(store)}
    assert stack.end(run) == "failed"
