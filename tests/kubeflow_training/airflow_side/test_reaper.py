"""Jobs that a killed worker leaves behind, and the reaper that finds them, in a real Airflow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from kubeflow_training.asking.instance import STORED_NAME
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.observation import Phase, observe
from kubeflow_training.jobs.reaping.orphans import INSTANCE_KEY, marked

from tests.kubeflow_training.outage import Proxy

WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(300)"
COUNT = iter(range(1000))


def reap(airflow, backend="local", namespaces=("default",)):
    """One run of the reaper's DAG; its task's state and its result."""
    run = f"reap-{next(COUNT)}"
    conf = {"backend": backend, "namespaces": list(namespaces)}
    airflow.ask("create", dag="reaping", run=run, conf=conf)
    airflow.mark()
    end = airflow.ask("attempt", dag="reaping", run=run)
    return end, airflow.ask("look", dag="reaping", run=run)["xcoms"].get("return_value")


def left_behind(new_run, airflow):
    """The job of a task whose worker is gone without a trace."""
    run = new_run("once", WAIT)
    airflow.ask("set_variable", key=STORED_NAME, value="the tests")
    owner = Owner("once", run.run, "train")
    run.manifest["metadata"]["labels"] = owner.labels("0.0", 1)
    run.manifest["metadata"]["annotations"] = owner.annotations("0.0", 1)
    airflow.cluster.create(marked(run.manifest, "the tests"))
    run.until(lambda: run.phase() is Phase.RUNNING)
    return run


def deleted(result):
    return [item["job"] for item in result["deleted"]]


def test_a_job_whose_worker_died_with_no_try_left_is_reaped_and_told(new_run, airflow):
    run = new_run("once", WAIT)
    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    run.airflow.signal(signal.SIGKILL)
    name = f"default/{run.name}"
    # Airflow does not know yet, or the task waits or will go on: the job is its.
    for state in ("running", "deferred", "up_for_retry", None):
        airflow.state_from_outside(run.dag, run.run, state)
        _, result = reap(airflow)
        assert deleted(result) == []
        assert result["kept"] >= 1
    # The scheduler misses the heartbeats, and there is no retry.
    airflow.state_from_outside(run.dag, run.run, "failed")
    # A job of nobody and one of another Airflow are beside it.
    bare, foreign = new_run("once", WAIT), new_run("once", WAIT)
    airflow.cluster.create(bare.manifest)
    foreign.manifest["metadata"] |= {
        key: {**run.job().job["metadata"][key], INSTANCE_KEY: "another"} for key in ("labels", "annotations")
    }
    airflow.cluster.create(foreign.manifest)
    began = time.monotonic()
    end, result = reap(airflow)
    assert end["state"] == "success"
    assert time.monotonic() - began >= 1, "the grace was not waited for"
    assert deleted(result) == [name]
    assert result["deleted"][0]["owner"] == f"once/{run.run}/train/-1"
    assert f"job {name} (uid {result['deleted'][0]['uid']}) is deleted because its task is failed" in airflow.log()
    run.until(lambda: run.job() is None)
    assert bare.job() is not None
    assert foreign.job() is not None
    for other in (bare, foreign):
        airflow.cluster.delete(other.name, "default", grace_seconds=0)


def test_a_job_of_a_run_that_was_deleted_is_reaped(new_run, airflow):
    run = left_behind(new_run, airflow)
    airflow.ask("forget", dag=run.dag, run=run.run)
    _, result = reap(airflow)
    assert deleted(result) == [f"default/{run.name}"]
    assert "knows no such task instance" in result["deleted"][0]["why"]
    run.until(lambda: run.job() is None)


def test_the_command_asks_a_real_api_server_and_deletes_nothing_when_it_is_away(new_run, airflow, tmp_path):
    run = left_behind(new_run, airflow)
    airflow.state_from_outside(run.dag, run.run, "failed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    passwords = tmp_path / "passwords.json"
    passwords.write_text('{"admin": "secret of this test"}')
    env = {
        **airflow.env,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        "AIRFLOW_API_URL": f"http://127.0.0.1:{port}",
        "AIRFLOW_API_USERNAME": "admin",
        "AIRFLOW_API_PASSWORD": "secret of this test",
    }

    def command(*more):
        call = [sys.executable, "-m", "kubeflow_training.reap", "--backend", "local", "--grace", "1", *more]
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert "secret of this test" not in done.stdout + done.stderr
        return done

    done = command()
    assert done.returncode == 2, done.stderr
    assert "nothing is deleted" in done.stderr
    with (tmp_path / "api.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "airflow", "api-server", "--workers", "1"],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v2/version", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "api.log").read_text()[-2000:]
                assert time.monotonic() < end, (tmp_path / "api.log").read_text()[-2000:]
                time.sleep(0.2)
        done = command("--dry-run")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert f"default/{run.name}" in [item["job"] for item in said["deleted"] + said["waiting"]]
        assert run.phase() is Phase.RUNNING
        done = command()
        assert deleted(json.loads(done.stdout)) == [f"default/{run.name}"], done.stderr
        run.until(lambda: run.job() is None)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.cluster
def test_a_kill_while_the_clusters_api_is_away_is_made_good_by_the_reaper(new_run, airflow, fewer_rights):
    rights, proxy = fewer_rights("events"), Proxy()
    cluster = KubernetesCluster(rights.client())
    path = rights.write(rights.kubeconfig.with_suffix(".proxied"), proxy.url)
    extra = {"kube_config_path": str(path)}
    airflow.env["AIRFLOW_CONN_RESTRICTED"] = json.dumps({"conn_type": "kubernetes", "extra": extra})
    airflow.end()  # the next one has the connection

    def phase():
        seen = cluster.read(run.name, rights.namespace)
        return observe(seen.job, seen.pods, seen.events).phase if seen else Phase.LOST

    def is_running():
        return phase() is Phase.RUNNING

    try:
        run = new_run("once", "sleep 300", backend="kubernetes", namespace=rights.namespace, cpus=0.05, memory_gb=0.05)
        run.begin_attempt()
        run.until(is_running)
        uid = cluster.read(run.name, rights.namespace).uid
        # A person marks the task while the cluster cannot be reached: the operator cannot delete the job.
        proxy.cut()
        airflow.state_from_outside(run.dag, run.run, "failed")
        airflow.signal(signal.SIGTERM)
        assert airflow.answer()["kind"] in ("TaskStopped", "JobNotReached")
        airflow.state_from_outside(run.dag, run.run, "failed")
        assert phase() is Phase.RUNNING
        # Nor can the reaper; it says so.
        end, result = reap(airflow, "kubernetes", [rights.namespace])
        assert (end["kind"], deleted(result), len(result["problems"])) == ("JobNotReached", [], 1)
        proxy.mend()
        _, result = reap(airflow, "kubernetes", [rights.namespace])
        assert [item["uid"] for item in result["deleted"]] == [uid]
        run.until(lambda: phase() is Phase.LOST)
        told = [item for item in cluster.last_words(rights.namespace, uid) if item["reason"] == "ReapedByAirflow"]
        assert "no task waits for it" in told[0]["message"]
    finally:
        proxy.close()
