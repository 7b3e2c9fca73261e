"""Every task of the fine-tune DAG fails, is killed, is ended by a person and is cleared; the result is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge import layout, ledger, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.drop import Drop
from dropforge.stack.state import AIRFLOW_USER
from dropforge.stages import JOBS, STAGES
from tests.e2e import faults
from tests.e2e.harness import EVALUATE, Stack, wait

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(3600)]

WAITING = ("confirm", *JOBS, "approve")  # they go on in another process
STRUCK_AT = STAGES + tuple(f"{task}.resumed" for task in WAITING)

STRUCK = "struck"
RECIPE = f"""\
extends: tiny
{EVALUATE}
train: {{max_steps: 3}}
compute: {{tokenize_ahead: true, limits: {{ask_above: {{core_hours: 0.001}}}}}}
promote: {{better_than_base: false, min_improvement: -0.9, approval: {{deadline_hours: 1}}}}
"""


YES = {"confirm": "Start", "approve": "Promote"}


def through(stack: Stack, run: str, seconds: float = 1800) -> str:
    """Answer the run's questions with yes as often as they are asked; how the run ends."""

    def ended() -> str | None:
        for task, option in YES.items():
            if stack.tasks(run).get(task, {}).get("state") == "awaiting_input":
                stack.connection.airflow.answer(FINETUNE, run, task, option)
                wait("the answer to be taken", lambda task=task: stack.tasks(run)[task]["state"] != "awaiting_input")
        state = stack.state(run)
        return state if state in {"success", "failed"} else None

    return str(wait(f"the end of {run}", ended, seconds, stack.going))


def result(stack: Stack, run: str, family: str) -> dict[str, Any]:
    """What users rely on, of a run that is over."""
    (tracked,) = stack.tracked(run)
    tags, store = tracked.data.tags, stack.connection.store
    folder = layout.run_prefix(tags[tracking.TAG_RUN])
    versions = stack.mlflow.search_model_versions(f"name = '{family}'")
    return {
        "DAG run": stack.state(run),
        "MLflow run": tracked.info.status,
        "MLflow runs": len(stack.mlflow.search_runs([tracked.info.experiment_id])),
        "versions": [version.version for version in versions],
        "champion": stack.champion(family),
        "verdict": tags[tracking.TAG_VERDICT],
        "approval": tags[tracking.TAG_APPROVAL],
        "verdict of the version": versions[0].tags[tracking.TAG_VERDICT],
        "processes": stack.ranks(),
        "model": {info.key: info.etag for info in store.list(f"{folder}model/")},
        "report": json.loads(store.get(layout.report_key(tags[tracking.TAG_RUN])))["steps"],
        "steps": [point.step for point in stack.mlflow.get_metric_history(tracked.info.run_id, "train/loss")],
    }


@pytest.fixture(scope="module")
def dropped(stack: Stack, samples: dict[int, dict[str, Path]]) -> tuple[Drop, str]:
    """A drop whose run is struck in every task after each of its changes, by turns killed and cut off."""
    for stage in STRUCK_AT:
        if "." in stage:
            faults.arm(stack.folder, STRUCK, stage, "kill", at_most=1)
        else:
            faults.arm(stack.folder, STRUCK, stage, "kill", "refuse")
    drop = stack.drop(STRUCK, "one", samples[2], RECIPE)
    run = wait_for_run(stack.connection, drop, 300)
    through(stack, run)
    for job in JOBS:
        if not faults.strikes(stack.folder, STRUCK, f"{job}.resumed"):
            faults.arm(stack.folder, STRUCK, f"{job}.resumed", at_most=0)  # nothing is to be struck while it is cleared
    return drop, run


@pytest.fixture(scope="module")
def struck(dropped: tuple[Drop, str]) -> str:
    return dropped[1]


@pytest.fixture(scope="module")
def whole(stack: Stack, struck: str) -> dict[str, Any]:
    """The result before anything is cleared."""
    return result(stack, struck, STRUCK)


def test_the_matrix_has_every_task(stack: Stack) -> None:
    found = stack.connection.airflow._call("GET", f"/api/v2/dags/{FINETUNE}/tasks")["tasks"]
    assert sorted(task["task_id"] for task in found) == sorted(STAGES)


@pytest.mark.parametrize("stage", STRUCK_AT)
def test_a_task_is_killed_and_cut_off_after_each_of_its_changes(stack: Stack, struck: str, stage: str) -> None:
    made = faults.strikes(stack.folder, STRUCK, stage)
    task, _, resumed = stage.partition(".")
    if resumed:
        # The next try finds the job ended, or the person's word, and has nothing to wait for. A job may be over before
        # its first try that was not struck looks, and then nothing of it goes on in another process.
        struck_at = [strike["how"] for strike in made]
        assert struck_at == ["kill"] or (task in JOBS and struck_at == [])
    else:
        assert {strike["how"] for strike in made if strike["where"] == faults.END} == {"kill", "refuse"}, made
    assert stack.tasks(struck)[task]["state"] == "success", stack.log(struck, task)


def test_the_result_is_that_of_a_run_to_which_nothing_happened(
    stack: Stack, dropped: tuple[Drop, str], whole: dict[str, Any]
) -> None:
    drop, run = dropped
    assert whole["DAG run"] == "success"
    assert whole["MLflow run"] == "FINISHED"
    assert whole["MLflow runs"] == 1
    assert whole["versions"] == [whole["champion"]]
    assert whole["verdict"].startswith("promote: ")
    assert f"{AIRFLOW_USER} said yes at " in whole["approval"]
    assert whole["steps"] == sorted(set(whole["steps"]))
    assert whole["report"] == 3
    assert whole["processes"] == []
    store = stack.connection.store
    assert store.stat(layout.turn_key(STRUCK)) is None
    assert ledger.owner_of(store, STRUCK, drop.id) == run
    assert ledger.owner_of(store, STRUCK, drop.id, 2) is None


@pytest.mark.parametrize("task", STAGES)
def test_a_task_is_cleared_alone(stack: Stack, struck: str, whole: dict[str, Any], task: str) -> None:
    """Nothing after it runs: the turn may be left behind, and a run that is open again is left to the reaper."""
    tries = stack.tasks(struck)[task]["try_number"]
    stack.clear(struck, task, downstream=False)
    assert through(stack, struck) == "success", stack.log(struck, task)
    assert stack.tasks(struck)[task]["try_number"] == tries + 1
    if task == "open_run":
        stack.connection.airflow.trigger("dropforge_reap", {})
        wait("the reaper", lambda: stack.tracked(struck)[0].info.status != "RUNNING", 60)
    assert result(stack, struck, STRUCK) == whole


@pytest.mark.parametrize("task", ["champion", "plan"])
def test_a_task_and_those_after_it_are_cleared(stack: Stack, struck: str, whole: dict[str, Any], task: str) -> None:
    stack.clear(struck, task)
    assert through(stack, struck) == "success"
    assert result(stack, struck, STRUCK) == whole
    assert stack.connection.store.stat(layout.turn_key(STRUCK)) is None


def test_a_no_is_not_asked_for_again_when_who_took_it_is_killed(
    stack: Stack, samples: dict[int, dict[str, Path]]
) -> None:
    faults.arm(stack.folder, "refused", "confirm.resumed", "kill", at_most=1)
    run = wait_for_run(stack.connection, stack.drop("refused", "one", samples[1], RECIPE), 300)
    wait("the question", lambda: stack.tasks(run).get("confirm", {}).get("state") == "awaiting_input", 600)
    stack.connection.airflow.answer(FINETUNE, run, "confirm", "Do not start")
    assert stack.end(run) == "failed"
    assert [strike["how"] for strike in faults.strikes(stack.folder, "refused", "confirm.resumed")] == ["kill"]
    assert stack.tasks(run)["confirm"]["try_number"] == 2
    (tracked,) = stack.tracked(run)
    assert tracked.data.tags[tracking.TAG_CONFIRMED].startswith(f"{AIRFLOW_USER} said no at ")
    assert tracked.info.status == "KILLED"
