"""The operator in a real Airflow: results, failures, restarts, kills and clears."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.meeting import MEET

both = pytest.mark.parametrize("mode", ["deferred", "sync"])
WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(120)"


def wait_for_file(path):
    wait = f"while not os.path.exists({str(path)!r}): time.sleep(0.02)"
    return f"import os, time\nprint('ready', flush=True)\n{wait}\nprint('done')"


@both
def test_success_gives_the_result_the_log_and_the_link(new_run, mode):
    progress = '@progress {"step": 3, "steps": 3, "loss": 1.5}'
    script = (
        f"import json, os; print('hello from', os.environ['RANK']); print({progress!r})\n"
        "end = {'exit_code': int(os.environ['RANK']) * 7, 'step': 3}\n"
        "open(os.environ['TERMINATION_LOG'], 'w').write(json.dumps(end))"
    )
    run = new_run(mode, script, nodes=2)
    assert run.attempt() == {"state": "success", "error": None, "kind": None}
    found = run.look()
    job = run.job()
    result = found["xcoms"]["return_value"]
    durations = result.pop("durations")
    assert durations["queued"] >= 0
    assert durations["running"] >= 0
    assert result == {
        "phase": "succeeded",
        "name": run.name,
        "namespace": "default",
        "uid": job.uid,
        "gang": 1,
        "message": {"exit_code": 0, "step": 3},
        "progress": {"step": 3, "steps": 3, "loss": 1.5},
    }
    assert found["xcoms"]["pytorch_job_link"] == f"http://127.0.0.1/jobs/default/{run.name}"
    assert found["xcoms"]["pytorch_job"]["uid"] == job.uid
    assert found["store"]["pytorch_job"]["uid"] == job.uid
    lines = run.airflow.log()
    assert "[master-0] hello from 0" in lines
    assert "[worker-0] hello from 1" in lines
    assert lines.count("[worker-0] hello from 1") == 1


@both
def test_a_user_error_fails_for_good_and_says_everything(new_run, mode):
    script = (
        "import json, os, sys, time\n"
        "if os.environ['RANK'] == '0': time.sleep(60)\n"
        "print('reading the recipe'); print('key train.lr is missing', file=sys.stderr)\n"
        "open(os.environ['TERMINATION_LOG'], 'w').write(json.dumps("
        "{'exit_code': 10, 'message': 'bad recipe: train.lr', 'rank': 1, 'step': None, 'steps': None}))\n"
        "sys.exit(10)"
    )
    run = new_run(mode, script, nodes=2)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    for part in (
        f"job default/{run.name} (attempt 1) failed, user error",
        "rank 1 (worker-0) failed first on",
        "exit code 10",
        "bad recipe: train.lr",
        "Correct the job's command",
        "Last lines of worker-0:",
        "    reading the recipe",
        "    key train.lr is missing",
    ):
        assert part in end["error"]


@both
def test_an_unknown_failure_is_retried_as_a_new_gang(new_run, mode, tmp_path):
    script = (
        f"import os, sys\npath = {str(tmp_path / 'tried')!r}\n"
        "if not os.path.exists(path):\n    open(path, 'w').close(); os.kill(os.getpid(), 9)\n"
        "print('better')"
    )
    run = new_run(mode, script)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("up_for_retry", "JobFailed")
    assert "exit code 137" in end["error"]
    first = run.job().uid
    assert run.attempt()["state"] == "success"
    result = run.look()["xcoms"]["return_value"]
    assert result["gang"] == 2
    assert result["uid"] == run.job().uid != first


@pytest.mark.smoke
def test_a_dead_worker_loses_nothing_and_the_retry_finds_the_job(new_run, tmp_path):
    go = tmp_path / "go"
    run = new_run("sync", wait_for_file(go))
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    uid = run.job().uid
    run.airflow.signal(signal.SIGKILL)
    assert run.phase() is Phase.RUNNING
    go.touch()
    run.until(lambda: run.phase() is Phase.SUCCEEDED)
    # The job ended while nobody watched; the same try chain takes its result.
    assert run.attempt()["state"] == "success"
    result = run.look()["xcoms"]["return_value"]
    assert (result["uid"], result["gang"], result["phase"]) == (uid, 1, "succeeded")
    # A clear is another chain: the old success is not told again.
    run.airflow.ask("clear", dag=run.dag, run=run.run)
    assert run.attempt()["state"] == "success"
    result = run.look()["xcoms"]["return_value"]
    assert result["uid"] == run.job().uid != uid
    assert result["gang"] == 2


def test_sigterm_of_the_worker_leaves_the_job_and_is_no_success(new_run, tmp_path):
    go = tmp_path / "go"
    run = new_run("sync", wait_for_file(go))
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    uid = run.job().uid
    run.airflow.signal(signal.SIGTERM)
    end = run.airflow.answer()
    assert (end["state"], end["kind"]) == ("up_for_retry", "TaskStopped")
    assert run.phase() is Phase.RUNNING
    go.touch()
    assert run.attempt()["state"] == "success"
    assert run.look()["xcoms"]["return_value"]["uid"] == uid


def test_a_person_who_marks_the_running_task_ends_the_job(new_run):
    run = new_run("sync", WAIT)
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    run.airflow.state_from_outside(run.dag, run.run, "failed")
    run.airflow.signal(signal.SIGTERM)
    end = run.airflow.answer()
    assert end["kind"] == "TaskStopped"
    assert "its job with it" in end["error"]
    run.until(lambda: run.job() is None)


@pytest.mark.parametrize("state", ["failed", "success", None])
def test_ending_a_deferred_task_deletes_the_job(new_run, state):
    run = new_run("deferred", WAIT)
    run.airflow.cluster.create(run.manifest)
    run.airflow.ask("set_state", dag=run.dag, run=run.run, state="deferred")
    arguments = run.trigger()
    run.airflow.ask("kill_trigger", dag=run.dag, run=run.run, state=state, arguments=arguments)
    run.until(lambda: run.job() is None)


def test_a_trigger_taken_over_by_another_triggerer_deletes_nothing(new_run):
    run = new_run("deferred", WAIT)
    run.airflow.cluster.create(run.manifest)
    arguments = run.trigger()
    run.airflow.ask("kill_trigger", dag=run.dag, run=run.run, state="deferred", arguments=arguments)
    assert "continues: the task is deferred" in run.airflow.log()
    job = run.job()
    assert job is not None
    assert "deletionTimestamp" not in job.job["metadata"]


def test_a_sensors_trigger_never_deletes(new_run):
    run = new_run("deferred_sensor", WAIT)
    run.airflow.cluster.create(run.manifest)
    arguments = run.trigger(owned=False)
    run.airflow.ask("kill_trigger", dag=run.dag, run=run.run, state="failed", arguments=arguments)
    assert "deletionTimestamp" not in run.job().job["metadata"]


def test_another_triggerer_goes_on_where_the_log_was_left(new_run, tmp_path):
    go = tmp_path / "go"
    script = (
        "import os, time\n"
        "for n in range(100): print('early', n)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "for n in range(100): print('late', n)"
    )
    run = new_run("deferred", script)
    run.airflow.cluster.create(run.manifest)
    run.until(lambda: run.phase() is Phase.RUNNING and run.airflow.cluster.tail(run.job().pods[0], 1) == ["early 99"])
    arguments = run.trigger()
    run.airflow.ask("stop_trigger", dag=run.dag, run=run.run, arguments=arguments, lines=101)
    assert run.phase() is Phase.RUNNING
    go.touch()
    run.airflow.mark()
    # The job ends, and the trigger with it.
    run.airflow.ask("kill_trigger", dag=run.dag, run=run.run, state="deferred", arguments=arguments, seconds=30)
    assert run.airflow.ranks() == [f"[master-0] late {n}" for n in range(100)]


def test_a_changed_spec_replaces_the_running_job(new_run, tmp_path):
    go = tmp_path / "go"
    run = new_run("sync", WAIT)
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    first = run.job().uid
    run.airflow.signal(signal.SIGTERM)
    assert run.airflow.answer()["state"] == "up_for_retry"
    go.touch()
    run.manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"][2] = (
        "print(1)"
    )
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf={"manifest": run.manifest})
    assert run.attempt()["state"] == "success"
    result = run.look()["xcoms"]["return_value"]
    assert result["gang"] == 2
    assert result["uid"] != first


def test_a_running_job_of_somebody_else_is_left_alone(new_run):
    run = new_run("deferred", WAIT)
    uid = run.airflow.cluster.create(run.manifest).uid
    end = run.attempt()
    assert end["state"] == "up_for_retry"
    assert "belongs to another owner" in end["error"]
    assert run.job().uid == uid


@both
def test_execution_timeout_ends_the_job(new_run, mode):
    run = new_run(f"{mode}_impatient", WAIT)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("up_for_retry", "AirflowTaskTimeout")
    run.until(lambda: run.job() is None)


@both
def test_execution_timeout_ends_one_try_of_the_sensor_and_leaves_the_job(new_run, mode):
    run = new_run(f"{mode}_impatient_sensor", WAIT)
    run.manifest["metadata"]["name"] = "job"
    job = run.airflow.cluster.create(run.manifest)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("up_for_retry", "AirflowTaskTimeout")
    assert run.airflow.cluster.read("job", "default").uid == job.uid
    run.airflow.cluster.delete("job", "default")
    run.until(lambda: run.airflow.cluster.read("job", "default") is None)


def test_a_manifest_may_come_from_another_task(new_run):
    run = new_run("piped", "print('from a task')")
    assert run.attempt("plan")["state"] == "success"
    assert run.attempt()["state"] == "success"
    assert "[master-0] from a task" in run.airflow.log()


def test_a_wrong_manifest_fails_for_good_before_any_job(new_run):
    run = new_run("deferred", "print(1)")
    run.manifest["metadata"]["name"] = "Upper"
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf={"manifest": run.manifest})
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "DNS-1035" in end["error"]


@both
def test_the_sensor_waits_for_a_job_of_somebody_else(new_run, mode):
    run = new_run(f"{mode}_sensor", "print(1)")
    run.manifest["metadata"]["name"] = "job"
    run.airflow.cluster.create(run.manifest)
    if mode == "sync":
        run.until(lambda: (job := run.airflow.cluster.read("job", "default")) and "completionTime" in job.job["status"])
    assert run.attempt()["state"] == "success"
    run.airflow.cluster.delete("job", "default")
    run.until(lambda: run.airflow.cluster.read("job", "default") is None)


@pytest.mark.cluster
@pytest.mark.skipif(not Path(os.environ.get("KUBECONFIG", "/none")).is_file(), reason="KUBECONFIG names no cluster")
@both
def test_the_same_on_kubernetes(new_run, mode, namespace):
    # The master's end is the job's: it waits until the worker has spoken.
    # And somewhat longer: a worker whose end the operator has not been told goes with the master's.
    last = '[ "$RANK" != 0 ] || { echo "hello from $RANK"; sleep 4; }'
    script = f'[ "$RANK" = 0 ] || echo "hello from $RANK"; {MEET} {last}'
    run = new_run(mode, script, backend="kubernetes", namespace=namespace, nodes=2, cpus=0.05, memory_gb=0.05)
    assert run.attempt()["state"] == "success"
    assert run.look()["xcoms"]["return_value"]["phase"] == "succeeded"
    lines = run.airflow.log()
    assert lines.count("[master-0] hello from 0") == lines.count("[worker-0] hello from 1") == 1, lines
    # A clear never tells the old success again: the old gang goes, and a new one comes.
    first = run.look()["store"]["pytorch_job"]["uid"]
    run.airflow.ask("clear", dag=run.dag, run=run.run)
    assert run.attempt()["state"] == "success"
    result = run.look()["xcoms"]["return_value"]
    assert (result["gang"], result["uid"] != first) == (2, True)
