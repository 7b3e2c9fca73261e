"""Each process of the stack is killed while drops arrive, train and are evaluated: the results are as without it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dropforge import layout, ledger, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.drop import Drop
from tests.e2e.harness import Stack, kill, logged_in, running, see_back, services, wait
from tests.stack import holds

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(5400)]

SERVICES: Final = (
    "objects",
    "mlflow",
    "database",
    "airflow-api",
    "airflow-scheduler",
    "airflow-dag-processor",
    "airflow-triggerer",
    "cluster",
)
FAMILIES: Final = ("red", "green", "blue")
QUIET: Final = "quiet"  # the same drops, before anything is killed
DROPS: Final = ("one", "two")
STEPS: Final = 200
RECIPE: Final = f"""\
extends: tiny
evaluate: {{max_rows: 8}}
train: {{max_steps: {STEPS}, checkpoint_every: 20}}
promote: {{better_than_base: false, min_improvement: -0.9}}
"""
ENDED: Final = 2400.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("kills") / "state"
    with running(folder) as found, logged_in(found):
        yield found


def rows(folder: Path, drop: str) -> dict[str, Path]:
    """A file of a few rows that no other drop has."""
    lines = [
        {"text": f"In case {n} of drop {drop}, {n} plus {n} is {2 * n}, and {n} times three is {3 * n}."}
        for n in range(60)
    ]
    path = folder / f"{drop}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"rows.jsonl": path}


def result(stack: Stack, drop: Drop) -> dict[str, Any]:
    """What users rely on."""
    store = stack.connection.store
    run = ledger.owner_of(store, drop.family, drop.id)
    assert run is not None
    (tracked,) = stack.tracked(run)
    tags, mlflow = tracked.data.tags, stack.mlflow
    folder = layout.run_prefix(tags[tracking.TAG_RUN])
    report = json.loads(store.get(layout.report_key(tags[tracking.TAG_RUN])))
    return {
        "DAG run": stack.state(run),
        "MLflow run": tracked.info.status,
        "MLflow runs": len(mlflow.search_runs([tracked.info.experiment_id])),
        "versions": sorted(one.version for one in mlflow.search_model_versions(f"name = '{drop.family}'")),
        "steps": [point.step for point in mlflow.get_metric_history(tracked.info.run_id, "train/loss")],
        "loss": report["eval"]["after"]["eval/loss"],
        "unsent": [info.key for info in store.list(f"{folder}unsent-")],
        "weights": {
            info.key.removeprefix(folder): info.etag
            for info in store.list(f"{folder}model/")
            if info.key.endswith(".safetensors")
        },
        "second claim": ledger.owner_of(store, drop.family, drop.id, 2),
        "failed runs": [one for one in holds.runs_of(stack, drop) if stack.state(one) == "failed"],
    }


def at_work(stack: Stack) -> set[str]:
    """The tasks that are at work now, of all runs."""
    states = {"running", "deferred", "queued", "scheduled", "up_for_retry", "up_for_reschedule"}
    found = stack.connection.airflow.task_states(FINETUNE, "~")
    return {str(one["task_id"]) for one in found if one["state"] in states}


def undisturbed(stack: Stack, files: dict[str, dict[str, Path]]) -> dict[str, dict[str, Any]]:
    """The results of both drops, before anything is killed."""
    found = {}
    for name in DROPS:
        drop = stack.drop(QUIET, name, files[name], RECIPE)
        assert stack.end(wait_for_run(stack.connection, drop, 300)) == "success"
        found[name] = result(stack, drop)
        assert found[name]["steps"][-1] == STEPS
    return found


def under_kills(stack: Stack, files: dict[str, dict[str, Path]]) -> list[Drop]:
    """Both drops of each family, uploaded while one process after another is killed; until the last has ended."""
    drops = [stack.drop(family, DROPS[0], files[DROPS[0]], RECIPE) for family in FAMILIES]
    later = list(FAMILIES)
    wait("trainings", stack.ranks, 600)
    for name in SERVICES:
        if later and name != "objects":  # a drop arrives right before the kill
            drops.append(stack.drop(later.pop(), DROPS[1], files[DROPS[1]], RECIPE))
        assert at_work(stack), f"nothing was at work when {name} was killed"
        kill(stack, name, holds.BACK)
    assert at_work(stack), "nothing was at work when the supervisor was killed"
    before = {name: services(stack)[name].pid for name in SERVICES}
    os.kill(holds.supervisor(stack).pid, signal.SIGKILL)
    for name, pid in before.items():
        assert pid is not None
        see_back(stack, name, pid, holds.BACK)
    for drop in drops:
        run = wait_for_run(stack.connection, drop, 600)
        assert stack.end(run) == "success", stack.unfinished(run)
    return drops


def test_each_process_is_killed_at_load_and_every_run_ends_as_without_it(stack: Stack, tmp_path: Path) -> None:
    files = {name: rows(tmp_path, name) for name in DROPS}
    quiet = undisturbed(stack, files)
    for drop in under_kills(stack, files):
        # The family has two runs by now.
        expected = quiet[drop.drop] | {"MLflow runs": len(DROPS), "versions": ["1", "2"]}
        assert result(stack, drop) == expected
