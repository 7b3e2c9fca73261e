"""The worker's process is killed at each step between store, create and defer: the next try ends with one job."""

from __future__ import annotations

import signal

import pytest
from kubeflow_training.jobs.observation import Phase

STEPS = [
    "before the identity is stored",
    "after the identity is stored",
    "after the create",
    "before the uid is stored",
    "after the uid is stored",
    "after the links are published",
    "before the deferral",
]


def counting(path, script="pass"):
    """A script that leaves one line per start of it."""
    return f"open({str(path)!r}, 'a').write('started\\n')\n{script}"


def dies(run, step, tmp_path):
    conf = {"manifest": run.manifest, "backend": "local", "die": step, "died": str(tmp_path / "died")}
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf=conf)
    assert run.airflow.ask("attempt_in_fork", dag=run.dag, run=run.run) == {"killed": signal.SIGKILL}


@pytest.mark.parametrize("step", STEPS)
def test_one_job_whatever_the_moment_of_death(new_run, tmp_path, step):
    starts = tmp_path / "starts"
    run = new_run("mortal", counting(starts))
    dies(run, step, tmp_path)
    if run.job() is not None:
        # It may even end while nobody looks.
        run.until(lambda: run.phase() is Phase.SUCCEEDED)
    assert run.attempt() == {"state": "success", "error": None, "kind": None}
    assert starts.read_text() == "started\n"
    assert [job.uid for job in run.jobs()] == [run.look()["xcoms"]["return_value"]["uid"]]
    stored = run.look()["store"]["pytorch_job"]
    assert (stored["gang"], stored["uid"]) == (1, run.job().uid)


def test_a_create_whose_answer_is_lost_is_found_by_its_token(new_run, tmp_path):
    starts = tmp_path / "starts"
    run = new_run("mortal", counting(starts))
    step = "the create's answer is lost"
    conf = {"manifest": run.manifest, "die": step, "died": str(tmp_path / "died")}
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf=conf)
    assert run.attempt()["state"] == "success"
    assert starts.read_text() == "started\n"
    assert len(run.jobs()) == 1


def test_a_create_that_takes_longer_than_the_task_may_leaves_no_job(new_run, tmp_path):
    run = new_run("mortal_impatient", "import time; time.sleep(300)")
    conf = {"manifest": run.manifest, "die": "the create's answer hangs", "died": str(tmp_path / "died")}
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf=conf)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "AirflowTaskTimeout")
    run.until(lambda: run.job() is None)


def test_a_death_after_the_old_gang_is_deleted_makes_one_new_gang(new_run, tmp_path):
    starts = tmp_path / "starts"
    run = new_run(
        "mortal", counting(starts, f"import os, sys\nsys.exit(9 if not os.path.exists({str(starts) + '2'!r}) else 0)")
    )
    assert run.attempt()["state"] == "up_for_retry"
    (tmp_path / "starts2").touch()
    dies(run, "after the old gang is deleted", tmp_path)
    assert run.attempt()["state"] == "success"
    assert starts.read_text() == "started\n" * 2
    assert [job.job["metadata"]["name"] for job in run.jobs()] == [f"{run.name}-g2"]


def test_nothing_that_is_stored_expires(new_run):
    run = new_run("deferred", "print(1)")
    assert run.attempt()["state"] == "success"
    assert set(run.airflow.ask("expiry", dag=run.dag, run=run.run).values()) == {None}


def test_a_dag_run_of_the_same_name_does_not_tell_the_old_success(new_run, tmp_path):
    """All but the store is as it was: the same run, task, generation and spec, and the old job is still there."""
    starts = tmp_path / "starts"
    run = new_run("deferred", counting(starts))
    assert run.attempt()["state"] == "success"
    run.airflow.ask("forget_state", dag=run.dag, run=run.run)
    assert run.attempt()["state"] == "success"
    assert starts.read_text() == "started\n" * 2
    assert run.look()["xcoms"]["return_value"]["gang"] == 2
