"""By the calendar, on the real stack: nothing changed is skipped with its reason, and force makes the next version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge import retrains
from dropforge.client.drops import wait_for_run
from dropforge.drop import Drop
from dropforge.run import RunSpec
from tests.e2e.harness import RECIPE, Stack, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "by-calendar"
DAG = f"dropforge_retrain_{FAMILY}"


def ended(stack: Stack, run: str) -> dict[str, str]:
    """The states of the calendar's run at its end, its own under an empty name."""
    airflow = stack.connection.airflow
    state = wait(
        f"the end of {run}",
        lambda: (s := airflow.dag_run(DAG, run)["state"]) in {"success", "failed"} and s,
        1200,
        stack.going,
    )
    return {"": str(state)} | {task["task_id"]: task["state"] for task in airflow.task_states(DAG, run)}


def triggered(stack: Stack, **conf: Any) -> str:
    return stack.connection.airflow.trigger(DAG, conf)


@pytest.fixture(scope="module")
def champion(stack: Stack, samples: dict[int, dict[str, Path]]) -> Drop:
    """A drop that became the family's champion."""
    drop = stack.drop(FAMILY, "one", samples[1], RECIPE)
    assert stack.end(wait_for_run(stack.connection, drop)) == "success"
    assert stack.champion(FAMILY) == "1"
    return drop


def test_nothing_changed_is_skipped_with_its_reason(stack: Stack, champion: Drop) -> None:
    run = triggered(stack)
    states = ended(stack, run)
    assert set(states.values()) == {"success", "skipped"}
    assert [name for name, state in states.items() if state == "success"] == [""]
    reason = "nothing changed: the champion, version 1, knows drop one, and its base is the same"
    assert reason in "\n".join(stack.connection.airflow.log(DAG, run, "look", 1))
    assert stack.xcom(DAG, run, "look", "reason") == reason


@pytest.fixture(scope="module")
def forced(stack: Stack, champion: Drop) -> str:
    """The calendar's run that a person forced."""
    run = triggered(stack, force=True)
    states = ended(stack, run)
    assert states.pop("late") == "skipped"  # nothing to compare with yet
    assert set(states.values()) == {"success"}, states
    return run


def test_force_makes_the_next_version(stack: Stack, champion: Drop, forced: str) -> None:
    fine = retrains.run_id(FAMILY, forced)
    assert stack.state(fine) == "success"
    (tracked,) = stack.tracked(fine)
    assert tracked.data.tags["dropforge.version"] == "2"
    assert tracked.data.tags["dropforge.retrain"] == "forced; nothing changed since the champion"
    assert tracked.data.tags["dropforge.drops"] == f"one ({champion.id})"
    spec = RunSpec.from_json(stack.connection.store.get(f"runs/{tracked.data.tags['dropforge.run']}/run.json"))
    assert spec.drop["parts"] == [{"drop": "one", "id": champion.id}]
    assert spec.drop["retrain"] == {
        "reason": "forced; nothing changed since the champion",
        "data": "all",
        "start": "base",
        "by": f"{DAG}/{forced}",
    }
    assert [one.run for one in retrains.ended(stack.connection.store, FAMILY)] == [fine]


def test_a_cleared_start_finds_its_run(stack: Stack, forced: str) -> None:
    """Nothing is trained twice, and the run of the calendar ends as before."""
    before = stack.connection.airflow.newest_runs("dropforge_finetune", 100)
    stack.connection.airflow.clear(DAG, forced, "start")
    states = ended(stack, forced)
    assert states[""] == "success", json.dumps(states)
    assert "is there: success" in "\n".join(stack.connection.airflow.log(DAG, forced, "start", 2))
    assert len(stack.connection.airflow.newest_runs("dropforge_finetune", 100)) == len(before)


def test_a_backfill_is_refused(stack: Stack, champion: Drop) -> None:
    assert "does not allow backfill runs" in stack.backfill(DAG, "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z")
