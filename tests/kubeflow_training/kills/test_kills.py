"""What is killed, stopped or taken away around a job leaves the job; a person who ends the task ends it."""

from __future__ import annotations

import os
import signal
from collections import Counter

import psutil
import pytest
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.kills.installation import TRIGGERERS

pytestmark = pytest.mark.e2e


def complete(run):
    """No line of the job is missing in the task's log; a triggerer may repeat what the one before showed last.

    How much that is depends on when the one before could last say how far it was: on a busy machine, all of it.
    """
    lines = run.lines()
    told = [line for line in lines if line.startswith("line ")]
    (count,) = {int(line.removeprefix("that was ")) for line in lines if line.startswith("that was ")}
    assert {f"line {n}" for n in range(count)} == set(told), run.text()
    assert max(Counter(told).values()) <= run.watches()


def test_a_stopped_triggerer_loses_its_trigger_and_wakes_up_without_harm(airflow, new_run):
    run = new_run("deferred")
    run.deferred()
    uid, first = run.uid(), run.triggerer
    airflow.stop(first)
    run.until(lambda: run.triggerer not in (None, first))
    airflow.signal(first, signal.SIGCONT)
    # It finds that its trigger is another's, and asks Airflow before it deletes anything.
    run.until(lambda: "continues: the task is deferred" in run.text())
    run.ends_well(uid)
    run.once()
    complete(run)


def test_killed_triggerers_are_followed_by_others(airflow, new_run):
    run = new_run("deferred")
    run.deferred()
    uid = run.uid()
    for name in TRIGGERERS:
        airflow.kill(name)
    assert run.phase() is Phase.RUNNING
    for name in TRIGGERERS:
        airflow.start(name)
    run.until(lambda: run.triggerer in TRIGGERERS)
    run.ends_well(uid)
    run.once()
    complete(run)


def test_triggerers_that_die_in_the_second_in_which_jobs_end(airflow, new_run):
    runs = [new_run("deferred") for _ in range(4)]
    for run in runs:
        run.deferred()
    uids = [run.uid() for run in runs]
    # The first end has probably been told by then, the last one not.
    for run in runs:
        run.place.release(run.name)
        run.until(lambda run=run: run.phase() is Phase.SUCCEEDED)
    for name in TRIGGERERS:
        airflow.kill(name)
    for name in TRIGGERERS:
        airflow.start(name)
    for run, uid in zip(runs, uids, strict=True):
        run.told_once(uid)
        run.once()
        complete(run)


def test_a_scheduler_is_killed_with_its_workers(airflow, new_run):
    sync, deferred, ending = new_run("sync"), new_run("deferred"), new_run("deferred")
    sync.running()
    deferred.deferred()
    ending.deferred()
    uids = [run.uid() for run in (sync, deferred, ending)]
    airflow.kill("scheduler")
    # One ends while nobody can tell it.
    ending.place.release(ending.name)
    ending.until(lambda: ending.state == "scheduled")
    airflow.start("scheduler")
    sync.found_again()
    sync.until(lambda: sync.state == "running")
    sync.ends_well(uids[0])
    deferred.ends_well(uids[1])
    ending.told_once(uids[2])
    assert (sync.tries, deferred.tries, ending.tries) == (2, 1, 1)
    complete(deferred)


def test_sigterm_of_the_worker_leaves_the_job_to_the_next_try(new_run):
    held = [new_run("deferred_held"), new_run("sync_held")]
    watching = new_run("sync")
    for run in held:
        run.held()
    watching.running()
    runs = [*held, watching]
    uids = [run.uid() for run in runs]
    for run in runs:
        os.kill(psutil.Process(run.process).ppid(), signal.SIGTERM)  # which passes it on, as in a pod
    for run in runs:
        run.until(lambda run=run: run.tries == 2)
        run.hold.touch()
    for run, uid in zip(runs, uids, strict=True):
        run.found_again()
        assert "this worker was stopped, while the task was running; the job continues" in run.text()
        run.ends_well(uid)
        assert run.tries == 2


def test_sigterm_of_the_worker_with_no_try_left_takes_the_job_with_it(new_run):
    run = new_run("sync_once")
    run.running()
    os.kill(psutil.Process(run.process).ppid(), signal.SIGTERM)
    run.until(lambda: run.state == "failed")
    run.until(lambda: not run.gangs())


def test_the_api_server_is_away_for_three_heartbeats(airflow, new_run):
    held, watching, waiting = new_run("deferred_patient"), new_run("sync_patient"), new_run("deferred")
    watching.hold.touch()
    held.held()
    watching.running()
    waiting.deferred()
    runs = [held, watching, waiting]
    uids = [run.uid() for run in runs]
    workers = [held.process, watching.process]
    with airflow.without_api():
        # After three failed heartbeats the worker's supervisor ends it.
        held.until(lambda: not any(map(psutil.pid_exists, workers)))
        held.hold.touch()
    held.found_again()
    watching.found_again()
    for run, uid in zip(runs, uids, strict=True):
        run.ends_well(uid)
    waiting.once()
    complete(waiting)


STAGES = {
    "queued": ("deferred", "too_large"),
    "starting": ("deferred_held", "slow"),
    "running": ("sync", "manifest"),
    "deferred": ("deferred", "manifest"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_person_ends_the_job(new_run, place, stage):
    runs = {act: new_run(*STAGES[stage]) for act in ("failed", "success", "clear")}
    for run in runs.values():
        if stage == "queued":
            run.until(lambda run=run: run.watched() and run.phase() is Phase.QUEUED)
        else:
            {"starting": run.held, "running": run.running, "deferred": run.deferred}[stage]()
        if stage == "starting" and place.kind == "kubernetes":
            run.until(lambda run=run: run.phase() is Phase.STARTING)
    uids = {act: run.uid() for act, run in runs.items()}
    runs["failed"].mark("failed")
    runs["success"].mark("success")
    runs["clear"].clear()
    for act, run in runs.items():
        run.until(lambda run=run, act=act: uids[act] not in [item.uid for item in place.gangs(run.name)], 30)
    cleared = runs.pop("clear")
    for act, run in runs.items():
        assert run.gangs() == []
        assert run.state == act
        assert "return_value" not in run.xcoms()
        assert "succeeded" not in run.text()
    # A new gang follows the cleared one, and goes like any.
    cleared.until(lambda: cleared.gangs() == [f"{cleared.name}-g2"])
    assert "return_value" not in cleared.xcoms()
    if stage in ("running", "deferred"):
        cleared.until(lambda: cleared.phase() is Phase.RUNNING)
        cleared.ends_well(cleared.uid())
    else:
        cleared.until(cleared.watched if stage == "queued" else lambda: cleared.state == "running")
        cleared.mark("failed")
        cleared.until(lambda: not cleared.gangs(), 30)
