"""A sweep on the real stack: nested runs, one that is stopped early, one version of the best; and one that is ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dropforge import sweep_tracking, sweeps, tracking
from dropforge.client.airflow import FINETUNE, SWEEP
from tests.e2e.harness import Stack, typed, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "swept"
FILE = """
recipe:
  extends: tiny
  train: {{max_steps: {steps}, eval_every: 10, checkpoint_every: 100}}
  compute: {{grace_seconds: 5}}
  evaluate: {{max_rows: 40}}
space:
  train.learning_rate: {rates}
at_once: 2
early_stop: {{after_trials: 1}}
"""


def told(stack: Stack, folder: Path, *more: str) -> str:
    """What the command says about the sweep of a folder."""
    file = str(folder / "sweep.yaml")
    done = typed(stack, "sweep", file, "--family", FAMILY, "--data", "prefix:sources/swept/", *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(stack: Stack, folder: Path, steps: int, rates: list[float], *more: str) -> str:
    """Start a sweep by the command, as a person does; its run in Airflow."""
    (folder / "sweep.yaml").write_text(FILE.format(steps=steps, rates=rates))
    (line,) = [line for line in told(stack, folder, *more).splitlines() if line.startswith("Sweep ")]
    return line.removeprefix("Sweep ").partition(": ")[0]


def ended(stack: Stack, run: str) -> str:
    airflow = stack.connection.airflow

    def state() -> str:
        found = str(airflow.dag_run(SWEEP, run)["state"])
        return found if found in {"success", "failed"} else ""

    return str(wait(f"the end of {run}", state, 600, stack.going))


def parent(stack: Stack, run: str) -> Any:
    (found,) = tracking.search(stack.mlflow, tracking.TAG_SWEEP, run, family=FAMILY)
    return found


def trials(stack: Stack, run: str) -> dict[int, Any]:
    """The MLflow runs below the sweep's own, by the trials' numbers."""
    found = tracking.search(stack.mlflow, tracking.TAG_PARENT, parent(stack, run).info.run_id, family=FAMILY)
    return {int(one.data.tags[tracking.TAG_TRIAL]): one for one in found}


def measured(stack: Stack, run: str, number: int) -> dict[int, float]:
    """What a trial has measured so far."""
    noted = sweeps.noted(stack.connection.store, FAMILY, run)
    if number not in noted:
        return {}
    uri = stack.connection.settings.tracking_uri
    return dict(sweep_tracking.curves(uri, {number: noted[number].mlflow_run}, "eval/loss")[number])


def of_trial(stack: Stack, run: str, number: int) -> list[psutil.Process]:
    name = sweeps.noted(stack.connection.store, FAMILY, run)[number].run
    return [process for process in stack.ranks() if any(name in word for word in process.cmdline())]


@contextlib.contextmanager
def halted(stack: Stack, run: str, number: int) -> Iterator[list[psutil.Process]]:
    """A trial's processes, which stand still: a fast machine would be done before anybody has looked."""
    held = of_trial(stack, run, number)
    for process in held:
        process.suspend()
    try:
        yield held
    finally:
        for process in held:
            with contextlib.suppress(psutil.Error):
                process.resume()


@pytest.fixture(scope="module")
def data(stack: Stack, samples: dict[int, dict[str, Path]]) -> None:
    for name, path in samples[1].items():
        if not name.startswith("_"):
            stack.connection.store.put(f"sources/swept/{name}", path.read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def sweep(stack: Stack, data: None, folder: Path) -> str:
    """A sweep of three trials, the second of which learns nothing and is held where it has been measured."""
    run = started(stack, folder, 120, [3e-3, 1e-9, 2.8e-3])
    wait("a measure of the bad trial", lambda: max(measured(stack, run, 1), default=0) > 0, 400, stack.going)
    with halted(stack, run, 1) as held:
        wait("its stop", lambda: sweeps.stopped(stack.connection.store, FAMILY, run, 1), 400, stack.going)
        wait("the end of its processes", lambda: not any(process.is_running() for process in held), 120)
    assert ended(stack, run) == "success"
    return run


def test_the_best_of_the_trials_is_the_one_version(stack: Stack, sweep: str) -> None:
    top, below = parent(stack, sweep), trials(stack, sweep)
    assert top.info.status == "FINISHED"
    assert {number: one.info.status for number, one in below.items()} == {0: "FINISHED", 1: "KILLED", 2: "FINISHED"}
    assert below[1].data.tags[tracking.TAG_ENDED_BY] == "sweep"
    assert "is worse than" in below[1].data.tags[tracking.TAG_STOPPED]
    assert stack.connection.airflow.mapped_states(SWEEP, sweep, "trial") == {0: "success", 1: "skipped", 2: "success"}

    losses = {number: below[number].data.metrics["eval/loss"] for number in (0, 2)}
    best = min(losses, key=lambda number: losses[number])
    assert top.data.tags["dropforge.best_trial"] == str(best)
    assert top.data.tags[tracking.TAG_BEST] == below[best].data.tags[tracking.TAG_RUN]
    assert top.data.metrics["eval/loss"] == pytest.approx(losses[best])
    assert [file.path for file in stack.mlflow.list_artifacts(top.info.run_id)] == ["trials.md"]
    (version,) = stack.mlflow.search_model_versions(f"name = '{FAMILY}'")
    assert version.run_id == below[best].info.run_id
    assert top.data.tags[tracking.TAG_VERSION] == str(version.version) == stack.champion(FAMILY) == "1"
    # The model was there: no second gang was started for it.
    assert below[best].data.tags[tracking.TAG_ATTEMPT] == "1"
    assert "There is nothing to do" in stack.log(sweeps.candidate_run(sweep), "train")


def test_the_command_finds_the_sweep_and_tells_its_end(stack: Stack, sweep: str, folder: Path) -> None:
    before = stack.connection.airflow.newest_runs(SWEEP, 100)
    assert "3 trials, 2 at once; nothing is started" in told(stack, folder, "--again", "2", "--dry-run")
    shown = told(stack, folder, "--follow")
    assert f"Sweep {sweep} was started before: success. Another one: --again 2" in shown
    tags = parent(stack, sweep).data.tags
    assert f"The best is trial {tags['dropforge.best_trial']}, learning_rate 0.00" in shown
    assert f"run {tags[tracking.TAG_BEST]}" in shown
    assert f"It is version 1 of {FAMILY}: promote: " in shown
    assert "trial 1 (learning_rate 1e-09): stopped early" in shown
    assert len(stack.connection.airflow.newest_runs(SWEEP, 100)) == len(before)


def test_in_the_list_of_runs_it_is_a_line_and_its_best_trial_another(stack: Stack, sweep: str) -> None:
    names = {one.data.tags[tracking.TAG_RUN] for one in trials(stack, sweep).values()}
    best = parent(stack, sweep).data.tags[tracking.TAG_BEST]
    lines = typed(stack, "runs", "--family", FAMILY).stdout.splitlines()
    assert {line.split()[0] for line in lines[1:] if line.split()} == {sweep, best}
    every = typed(stack, "runs", "--family", FAMILY, "--trials").stdout.splitlines()
    assert {line.split()[0] for line in every[1:] if line.split()} == {sweep, *names}


def test_a_trial_that_was_stopped_early_is_not_resumed(stack: Stack, sweep: str) -> None:
    done = typed(stack, "resume", trials(stack, sweep)[1].data.tags[tracking.TAG_RUN])
    assert done.returncode == 2
    assert "Submit its recipe as a run of its own" in done.stderr
    run = sweeps.trial_run(sweep, 1)
    assert stack.state(run) == "failed"
    stack.clear(run, "train")  # and with it `open_run`, which is its setup
    assert stack.end(run) == "failed"
    assert "Submit its recipe as a run of its own" in stack.log(run, "open_run")
    assert trials(stack, sweep)[1].info.status == "KILLED"


def test_a_cleared_choice_is_the_same_and_trains_nothing(stack: Stack, sweep: str) -> None:
    before = stack.connection.airflow.newest_runs(FINETUNE, 100)
    winner = parent(stack, sweep).data.tags[tracking.TAG_BEST]
    stack.connection.airflow.clear(SWEEP, sweep, "best")
    assert ended(stack, sweep) == "success"
    assert parent(stack, sweep).data.tags[tracking.TAG_BEST] == winner
    assert parent(stack, sweep).info.status == "FINISHED"
    assert len(stack.mlflow.search_model_versions(f"name = '{FAMILY}'")) == 1
    assert len(stack.connection.airflow.newest_runs(FINETUNE, 100)) == len(before)


def test_a_sweep_that_a_person_ends_leaves_nothing_running(stack: Stack, data: None, tmp_path: Path) -> None:
    run = started(stack, tmp_path, 20_000, [2e-3, 4e-3, 5e-3], "--again", "2")
    assert run.endswith("__2")
    wait("two trials that train", lambda: all(measured(stack, run, number) for number in (0, 1)), 400, stack.going)
    assert set(sweeps.noted(stack.connection.store, FAMILY, run)) == {0, 1}, "two at once"
    done = typed(stack, "stop", run, "--yes")
    assert done.returncode == 0, done.stderr
    assert "It is stopped, and nothing of it runs any more" in done.stdout
    assert ended(stack, run) == "failed"
    assert not stack.ranks()
    assert parent(stack, run).info.status == "KILLED"
    assert {one.info.status for one in trials(stack, run).values()} == {"KILLED"}
    assert len(stack.mlflow.search_model_versions(f"name = '{FAMILY}'")) <= 1


def test_a_trial_that_is_better_when_it_is_cleared_is_judged_too(stack: Stack, data: None, tmp_path: Path) -> None:
    airflow = stack.connection.airflow
    run = started(stack, tmp_path, 60, [3e-3, 1e-9], "--again", "3")
    wait("a measure of the good trial", lambda: max(measured(stack, run, 0), default=0) > 0, 400, stack.going)
    with halted(stack, run, 0):
        assert typed(stack, "stop", sweeps.trial_run(run, 0), "--yes").returncode == 0
    assert ended(stack, run) == "success"
    first = parent(stack, run).data.tags
    assert first["dropforge.best_trial"] == "1"
    airflow.clear(SWEEP, run, "trial")
    wait("that it goes on", lambda: airflow.dag_run(SWEEP, run)["state"] != "success")
    assert ended(stack, run) == "success"
    tags = parent(stack, run).data.tags
    assert (tags["dropforge.best_trial"], parent(stack, run).info.status) == ("0", "FINISHED")
    assert tags[tracking.TAG_VERSION] != first[tracking.TAG_VERSION]
    version = stack.mlflow.get_model_version(FAMILY, tags[tracking.TAG_VERSION])
    assert version.tags[tracking.TAG_RUN] == tags[tracking.TAG_BEST] != first[tracking.TAG_BEST]


def test_why_a_sweep_failed_is_told(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE.format(steps=3, rates=[1e-3, 2e-3]))
    words = ("sweep", str(file), "--family", FAMILY, "--drop", "none")
    done = typed(stack, *words, "--follow")
    assert done.returncode == 1, done.stderr
    assert f"The sweep has failed at plan: drop {FAMILY}/none: " in done.stdout
    done = typed(stack, *words)
    assert done.returncode == 2
    assert "start it again with --again 2" in done.stderr
