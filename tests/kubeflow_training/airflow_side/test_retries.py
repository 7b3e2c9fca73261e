"""Retries by cause in a real Airflow: what is counted, what is not, and what a lost worker does not hide."""

from __future__ import annotations

import signal

import pytest
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.retries import AVOID_KEY, LEDGER_KEY

both = pytest.mark.parametrize("mode", ["deferred_by_cause", "sync_by_cause"])


def failing(path, codes):
    """A script whose gangs end with these codes, one after the other, and then well."""
    return (
        f"import os, sys\npath = {str(path)!r}\n"
        "n = len(open(path).read()) if os.path.exists(path) else 0\n"
        "open(path, 'a').write('x')\n"
        f"sys.exit(({codes!r} + [0] * 9)[n])"
    )


@both
def test_budgets_end_each_for_its_own_cause(new_run, mode, tmp_path):
    run = new_run(mode, failing(tmp_path / "tries", [20, 21, 20, 21]))
    states = [run.attempt()["state"] for _ in range(4)]
    assert states == ["up_for_retry"] * 3 + ["failed"]
    ledger = run.look()["store"][LEDGER_KEY]
    assert [item["reason"] for item in ledger["failures"]] == ["preempted", "collective timeout"] * 2
    assert [item["gang"] for item in ledger["failures"]] == [1, 2, 3, 4]
    log = run.airflow.log()
    assert "preempted: retry 1 of 2" in log
    assert "collective timeout: failure 2, and its budget of 1 retries is used up" in log


def test_bad_data_is_not_retried_whatever_is_left(new_run, tmp_path):
    run = new_run("deferred_by_cause", failing(tmp_path / "tries", [11]))
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "Correct the data" in end["error"]


def test_a_gang_that_no_worker_saw_fail_is_counted_by_the_next_try(new_run, tmp_path):
    go = tmp_path / "go"
    wait = f"import os, sys, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nsys.exit(21)"
    run = new_run("sync_by_cause", wait)
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    run.airflow.signal(signal.SIGKILL)
    go.touch()
    run.until(lambda: run.phase() is Phase.FAILED)
    # The budget is one: the next try replaces the gang that failed unseen, and the second failure ends the task.
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailed")
    store = run.look()["store"]
    assert [item["gang"] for item in store[LEDGER_KEY]["failures"]] == [1, 2]
    assert len(store[AVOID_KEY]) == 1
    # The second gang was asked to avoid the first one's node; that changed nothing about whose job it is.
    affinity = run.job().job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["affinity"]
    assert store[AVOID_KEY][0]["node"] in str(affinity)
    # A clear is a new beginning.
    run.airflow.ask("clear", dag=run.dag, run=run.run)
    assert run.attempt()["state"] == "up_for_retry"
    assert len(run.look()["store"][LEDGER_KEY]["failures"]) == 1


def test_a_used_up_budget_ends_the_task_also_if_no_worker_saw_it(new_run, tmp_path):
    run = new_run("sync_by_cause", failing(tmp_path / "tries", [21]) + "\n")
    assert run.attempt()["state"] == "up_for_retry"
    go = tmp_path / "go"
    (tmp_path / "tries").unlink()
    # The second gang fails while its worker is dead.
    run.manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"][2] = (
        f"import os, sys, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nsys.exit(21)"
    )
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf={"manifest": run.manifest, "backend": "local"})
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    run.airflow.signal(signal.SIGKILL)
    go.touch()
    run.until(lambda: run.phase() is Phase.FAILED)
    second = run.job().uid
    end = run.attempt()
    assert end["state"] == "failed"
    assert run.job().uid == second
    assert "budget of 1 retries is used up" in run.airflow.log()


def test_preemption_costs_nothing_of_the_number_that_comes_at_run_time(new_run, tmp_path):
    run = new_run("shared_budget", failing(tmp_path / "tries", [20, 20, 21]))
    assert run.attempt("plan")["state"] == "success"
    assert [run.attempt()["state"] for _ in range(3)] == ["up_for_retry", "up_for_retry", "failed"]
    assert "counted in compute.retries" in run.airflow.log()
