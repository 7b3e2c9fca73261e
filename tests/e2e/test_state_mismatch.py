"""A late report of the executor ends each waiting task of a run as it is resumed: the next try does no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest.words import OWNER_ANNOTATION

from dropforge import checkpoints, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.stack.state import AIRFLOW_USER
from tests import late_reports, local_settings
from tests.e2e.harness import EVALUATE, Stack, running, wait
from tests.late_reports import POINTS, Order, Point, order

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

JOBS = ("tokenise", "train", "evaluate")
CHECKPOINTS = "dropforge_checkpoints"
RECIPE = f"""\
extends: tiny
{EVALUATE}
compute: {{tokenize_ahead: true}}
train: {{max_steps: 4}}
promote: {{better_than_base: false, min_improvement: -0.9, approval: {{deadline_hours: 1}}}}
"""
ANSWERS: dict[Point, str] = {"queued": "Keep the champion", "begun": "Promote", "done": "Keep the champion"}


class Late(NamedTuple):
    """A run. :param orders: of the late report on each of its tasks that wait."""

    point: Point
    run: str
    orders: dict[str, Order]

    @property
    def family(self) -> str:
        return f"late-{self.point}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose executor reports late where it is asked to."""
    folder = tmp_path_factory.mktemp("late")
    local_settings.install(folder / "airflow", late_reports.__file__)
    with running(folder) as found:
        yield found


@pytest.fixture(scope="module")
def runs(stack: Stack, samples: dict[int, dict[str, Path]]) -> dict[Point, Late]:
    """One run for each point at which a report may come; a person has answered each one's question, once."""
    found = {}
    for point in POINTS:
        run = wait_for_run(stack.connection, stack.drop(f"late-{point}", "one", samples[2], RECIPE), 300)
        tasks = (*JOBS, "approve")
        orders = {task: order(stack.folder / "airflow", FINETUNE, run, task, point) for task in tasks}
        found[point] = Late(point, run, orders)
    for late in found.values():
        stack.see(late.run, "approve", "awaiting_input")
        stack.connection.airflow.answer(FINETUNE, late.run, "approve", ANSWERS[late.point])
    return found


@pytest.fixture(params=POINTS)
def late(request: pytest.FixtureRequest, runs: dict[Point, Late]) -> Late:
    return runs[request.param]


def log(stack: Stack, run: str, task: str, attempt: int) -> str:
    """A try's log as files: of a try that ended while it was queued Airflow's API knows nothing."""
    folder = stack.folder / "airflow" / "logs" / f"dag_id={FINETUNE}" / f"run_id={run}" / f"task_id={task}"
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"attempt={attempt}.log*")))


def jobs(stack: Stack, run: str, task: str) -> int:
    """How many jobs a task has made."""
    cluster = LocalCluster(stack.env["KUBEFLOW_TRAINING_HOME"])
    owners = [item.annotations[OWNER_ANNOTATION] for item in cluster.jobs()]
    return sum(run in owner and f"/{task}" in owner for owner in owners)


def test_each_task_ends_well_with_its_one_job(stack: Stack, late: Late) -> None:
    assert stack.end(late.run) == "success"
    for task in JOBS:
        assert late.orders[task].marked("read"), f"{task} was not resumed before the report came"
        assert stack.tasks(late.run)[task]["try_number"] == 2
        logs = [log(stack, late.run, task, number) for number in (1, 2)]
        assert logs[1].count("Try 1 waited, and Airflow ended it as it was resumed") == 1, logs[1]
        assert " succeeded" in logs[1], logs[1]
        assert "own failure" not in "\n".join(logs), "it cost one of the task's own failures"
        assert jobs(stack, late.run, task) == 1
    (tracked,) = stack.tracked(late.run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "1"


def test_who_has_answered_is_not_asked_again(stack: Stack, late: Late) -> None:
    assert stack.end(late.run) == "success"
    assert late.orders["approve"].marked("read")
    tries = int(stack.tasks(late.run)["approve"]["try_number"])
    logs = [log(stack, late.run, "approve", number) for number in range(1, tries + 1)]
    assert tries == 2, logs
    assert "Try 1 waited, and Airflow ended it as it was resumed" in logs[1]
    assert sum(log.count("The answer is waited for until ") for log in logs) == 1, "one question"
    (tracked,) = stack.tracked(late.run)
    yes = ANSWERS[late.point] == "Promote"
    assert f"{AIRFLOW_USER} said {'yes' if yes else 'no'} at " in tracked.data.tags[tracking.TAG_VERDICT]
    assert (stack.champion(late.family) is not None) is yes


def test_a_checkpoint_is_looked_at_once(stack: Stack, late: Late) -> None:
    assert stack.end(late.run) == "success"
    (tracked,) = stack.tracked(late.run)
    report = order(stack.folder / "airflow", CHECKPOINTS, "", "work", late.point)
    stack.mlflow.set_tag(tracked.info.run_id, checkpoints.ASK, "last evaluate")

    def tags() -> dict[str, str]:
        return dict(stack.mlflow.get_run(tracked.info.run_id).data.tags)

    wait("the answer", lambda: checkpoints.ASK not in tags())
    assert tags()[checkpoints.ANSWER].startswith("last evaluate: loss ")
    assert report.marked("read")
    report.path.unlink()  # the next point's is another
    (run, *_) = stack.connection.airflow.newest_runs(CHECKPOINTS, 1)
    assert jobs(stack, run["dag_run_id"], "work") == 1
