"""What a run would take is told and asked before a pod exists, and what it has taken is recorded."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
import yaml

from dropforge import layout, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.stack.state import AIRFLOW_USER
from tests.e2e.harness import Stack, typed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILY = "costs"
SOURCE = "lake/costs/"
ASKS = {"price": {"core_hour": 100, "currency": "EUR"}, "limits": {"ask_above": {"cost": 0.001}}}


def start(stack: Stack, steps: int, **compute: object) -> str:
    """A run from the form, of a pasted recipe, on rows that lie in the bucket."""
    rows = [{"text": f"Hour {n} of the costs has {n} minutes in {n % 7} parts, and {n + 1} more."} for n in range(60)]
    stack.connection.store.put(f"{SOURCE}rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    recipe = {
        "extends": "tiny",
        "train": {"max_steps": steps, "log_every": 1},
        "evaluate": {"max_rows": 40},
        "promote": {"better_than_base": False},
        "compute": compute,
    }
    conf = {"data": f"prefix:{SOURCE}", "family": FAMILY, "again": True, "recipe": yaml.safe_dump(recipe)}
    return stack.connection.airflow.trigger(FINETUNE, {**conf, "train_seed": 23})


def asked(stack: Stack, run: str) -> None:
    """Wait until a person is asked whether the run may begin."""
    stack.see(run, "confirm", "awaiting_input", 240)


def error(stack: Stack, run: str, task: str) -> str:
    return stack.connection.airflow.error(FINETUNE, run, task, 1) or ""


@pytest.fixture(scope="module")
def refused(stack: Stack) -> str:
    """A run of which nobody knows what it will cost, and that a person refuses."""
    run = start(stack, 6, **ASKS)
    asked(stack, run)
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "RUNNING"
    assert tracked.data.tags[tracking.TAG_CONFIRMED].startswith("asked until ")
    assert "cost not known" in tracked.data.tags[tracking.TAG_PLAN]
    assert tracked.data.metrics["plan/tokens"] == 6 * 1024
    assert tracked.data.metrics["plan/gpu_hours"] == 0
    assert "plan/core_hours" not in tracked.data.metrics
    path = f"/api/v2/dags/{FINETUNE}/dagRuns/{quote(run, safe='')}/taskInstances/open_run/links"
    link = stack.connection.airflow._call("GET", path)["extra_links"]["MLflow run"]
    assert link.endswith(f"/runs/{tracked.info.run_id}")
    said = {
        "data.source.prefix": SOURCE,
        "train.max_steps": "6",
        "train.seed": "23",
        "compute.price.core_hour": "100.0",
    }
    assert {key: tracked.data.params[key] for key in said} == said
    done = typed(stack, "approve", run, "--no")
    assert done.returncode == 0, done.stderr
    assert "cost not known, and `compute.limits.ask_above.cost` is 0.001" in done.stdout
    assert stack.end(run) == "failed"
    return run


def test_a_no_ends_the_run_before_a_pod_exists(stack: Stack, refused: str) -> None:
    tasks = stack.tasks(refused)
    assert tasks["confirm"]["state"] == "failed"
    assert tasks["confirm"]["try_number"] == 1
    assert tasks["train"]["state"] == "upstream_failed"
    assert stack.ranks() == []
    assert f"does not begin: {AIRFLOW_USER} said no at " in error(stack, refused, "confirm")
    assert "tokens: 6,144" in stack.log(refused, "check_data")
    (tracked,) = stack.tracked(refused)
    assert tracked.info.status == "KILLED"
    assert tracked.data.tags[tracking.TAG_ENDED_BY] == "confirm"
    assert f"{AIRFLOW_USER} said no at " in tracked.data.tags[tracking.TAG_CONFIRMED]
    assert stack.connection.store.stat(layout.report_key(tracked.data.tags[tracking.TAG_RUN])) is None


@pytest.fixture(scope="module")
def begun(stack: Stack, refused: str) -> str:
    """The same run, cleared, let go by a person, and cancelled once it has trained."""
    stack.clear(refused, "confirm")
    asked(stack, refused)
    assert typed(stack, "approve", refused, "--yes").returncode == 0
    stack.see(refused, "train", "success")
    stack.cancel(refused)
    assert stack.end(refused) == "failed"
    return refused


def test_a_yes_lets_it_go_on_and_holds_after_a_clear(stack: Stack, begun: str) -> None:
    (tracked,) = stack.tracked(begun)
    assert tracked.info.status == "KILLED"
    assert tracked.data.metrics["cost/core_hours"] > 0
    assert tracked.data.metrics["cost/total"] == pytest.approx(100 * tracked.data.metrics["cost/core_hours"])
    assert " EUR; " in tracked.data.tags[tracking.TAG_COST]
    stack.clear(begun, "confirm")
    stack.see(begun, "confirm", "success")
    stack.cancel(begun)
    assert stack.end(begun) == "failed"
    assert f"Approved before: {AIRFLOW_USER} said yes at " in stack.log(begun, "confirm")


def test_a_run_that_has_used_what_it_may_is_ended_without_a_retry(stack: Stack, begun: str) -> None:
    run = start(stack, 100_000, limits={"stop_above": {"core_hours": 0.003}})
    assert stack.end(run) == "failed"
    assert "measured by a run of the family with this model and compute" in stack.log(run, "check_data")
    assert "it would be ended before it is done: core-hours " in stack.log(run, "check_data")
    tasks = stack.tasks(run)
    assert (tasks["train"]["state"], tasks["train"]["try_number"]) == ("failed", 1)
    assert "has used what it may" in error(stack, run, "train")
    assert stack.ranks() == []
    (tracked,) = stack.tracked(run)
    assert (tracked.info.status, tracked.data.tags[tracking.TAG_ENDED_BY]) == ("FAILED", "train")
    assert 0.003 <= tracked.data.metrics["cost/core_hours"] < 0.1
    assert tracked.data.metrics["cost/gpu_hours"] == 0
    assert "`compute.limits.stop_above.core_hours` is 0.003" in tracked.data.tags[tracking.TAG_COST]
