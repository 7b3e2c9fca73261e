"""What goes wrong between Airflow and a real cluster: clear errors or patience, never a lost or doubled job."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time

import pytest
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, observe
from kubernetes import config

from tests.kubeflow_training.outage import Proxy
from tests.kubeflow_training.rights import ACCOUNT, documents

pytestmark = pytest.mark.cluster
both = pytest.mark.parametrize("mode", ["deferred", "sync"])


class There:
    """A run whose jobs are on the real cluster, seen with the tests' own rights."""

    def __init__(self, new_run, rights, dag, script, **more):
        self.rights, self.cluster = rights, KubernetesCluster(rights.client())
        values = {"cpus": 0.05, "memory_gb": 0.05, "grace_seconds": 2} | more
        self.run = new_run(dag, script, backend="kubernetes")
        command = ["/bin/sh", "-c", script]
        name = f"{self.run.name}-{time.time_ns() % 10**8}"
        values = {"name": name, "namespace": rights.namespace, "image": "test.local/shell:1"} | values
        self.manifest = pytorch_job(command=command, **values)
        conf = {"manifest": self.manifest, "backend": "kubernetes"}
        self.run.airflow.ask("set_conf", dag=dag, run=self.run.run, conf=conf)
        self.run.airflow.mark()

    def jobs(self):
        return self.cluster.jobs(self.rights.namespace)

    def mine(self):
        base = self.manifest["metadata"]["name"]
        return [job for job in self.jobs() if job.job["metadata"]["name"].startswith(base)]

    def phase(self):
        now = self.cluster.read(self.manifest["metadata"]["name"], self.rights.namespace)
        return observe(now.job, now.pods, now.events).phase if now else Phase.LOST


@pytest.fixture
def there(new_run, rights, airflow):
    rights.write(airflow.other_kubeconfig)
    made = []

    def make(dag, script, **more):
        made.append(There(new_run, more.pop("rights", rights), dag, script, **more))
        return made[-1]

    yield make
    for item in made:
        for job in item.mine():
            item.cluster.delete(job.job["metadata"]["name"], item.rights.namespace, uid=job.uid)


@pytest.fixture
def proxy():
    found = Proxy()
    yield found
    found.close()


@both
def test_a_job_that_its_time_to_live_removes_at_once_has_succeeded(there, mode):
    one = there(f"{mode}_other", "sleep 2; echo done", ttl_seconds=0)
    assert one.run.attempt() == {"state": "success", "error": None, "kind": None}
    assert one.run.look()["xcoms"]["return_value"]["phase"] == "succeeded"
    one.run.until(lambda: not one.mine())


@both
def test_a_job_whose_image_cannot_be_pulled_holds_no_node_after_its_failure(there, mode):
    one = there(f"{mode}_other", "true", image="test.local/none:1", image_pull_policy="Never")
    end = one.run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "failed, image:" in end["error"]
    one.run.until(lambda: not one.mine())


def test_a_success_that_nobody_saw_and_that_is_removed_is_told_from_its_events(there):
    one = there("sync_other", "sleep 4", ttl_seconds=0)
    one.run.begin_attempt()
    one.run.until(lambda: one.phase() is Phase.RUNNING)
    one.run.airflow.signal(9)
    one.run.until(lambda: not one.mine())
    assert one.run.attempt() == {"state": "success", "error": None, "kind": None}
    assert one.run.look()["xcoms"]["return_value"]["gang"] == 1
    assert not one.mine()


@both
def test_a_namespace_that_does_not_exist_ends_the_task_with_the_clusters_words(there, mode):
    one = there(f"{mode}_other", "true", namespace="there-is-no-such-namespace")
    end = one.run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "there-is-no-such-namespace" in end["error"]


def test_a_revoked_token_is_waited_out_and_the_retry_finds_the_job(there, airflow, fewer_rights):
    """The service account is made anew while the job runs: what the worker has is worthless from then on."""
    own = fewer_rights("events")
    own.write(airflow.other_kubeconfig)
    one = there("sync_other", "sleep 20", rights=own)
    own.write(airflow.other_kubeconfig)
    one.run.begin_attempt()
    one.run.until(lambda: one.phase() is Phase.RUNNING)
    account = documents(own.namespace)[0]
    own._core.delete_namespaced_service_account(ACCOUNT, own.namespace)
    own._core.create_namespaced_service_account(own.namespace, account)
    # What the token's cache in the API server remembers is over after some seconds.
    time.sleep(11)
    own.write(airflow.other_kubeconfig)
    end = one.run.airflow.answer()
    one.cluster = KubernetesCluster(config.new_client_from_config(str(airflow.other_kubeconfig)))
    if end["state"] != "success":
        assert (end["state"], end["kind"]) == ("up_for_retry", "JobNotReached")
        assert one.run.attempt()["state"] == "success"
    assert len(one.mine()) == 1


def test_a_worthless_token_is_no_failed_job(there, airflow):
    one = there("sync_other", "true")
    text = airflow.other_kubeconfig.read_text()
    airflow.other_kubeconfig.write_text(text.replace('"token": "', '"token": "x'))
    end = one.run.attempt()
    assert (end["state"], end["kind"]) == ("up_for_retry", "JobNotReached")
    assert "Renew the cluster's credentials" in end["error"]
    airflow.other_kubeconfig.write_text(text)
    assert one.run.attempt()["state"] == "success"
    assert len(one.mine()) == 1


@both
def test_an_api_that_is_away_while_the_job_ends_costs_nothing(there, airflow, proxy, rights, mode):
    rights.write(airflow.other_kubeconfig, proxy.url)
    one = there(f"{mode}_other", "sleep 3; echo done")
    rights.write(airflow.other_kubeconfig, proxy.url)
    one.run.begin_attempt()
    one.run.until(lambda: one.phase() is Phase.RUNNING)
    proxy.cut()
    one.run.until(lambda: one.phase() is Phase.SUCCEEDED)
    threading.Timer(2, proxy.mend).start()
    assert one.run.airflow.answer()["state"] == "success"
    assert len(one.mine()) == 1
    assert one.run.airflow.log().count("[master-0] done") == 1, one.run.airflow.log()


def test_an_api_that_is_away_at_the_start_is_waited_for(there, airflow, proxy, rights):
    one = there("deferred_other", "true")
    rights.write(airflow.other_kubeconfig, proxy.url)
    proxy.cut()
    threading.Timer(5, proxy.mend).start()
    assert one.run.attempt()["state"] == "success"
    assert len(one.mine()) == 1


def test_a_held_gang_is_started_by_the_line_that_the_log_shows(there):
    one = there("sync_held_there", "echo trained as $RANK of $WORLD_SIZE at $MASTER_ADDR", nodes=2)
    one.run.begin_attempt()
    one.run.until(lambda: one.phase() is Phase.RUNNING)
    lines = [line.split("kubectl ", 1)[1] for line in one.run.airflow.log().splitlines() if "kubectl exec" in line]
    lines = [line.split("  ")[0].strip() for line in lines]
    said = subprocess.run(["kubectl", *shlex.split(lines[1])], capture_output=True, text=True, check=True).stdout
    name = one.manifest["metadata"]["name"]
    assert said == f"trained as 1 of 2 at {name}-master-0\n"
    for pod in ("worker-0", "master-0"):  # with the master's end the operator ends the worker
        release = f"exec -n {one.rights.namespace} {name}-{pod} -c pytorch -- touch /tmp/release"
        subprocess.run(["kubectl", *release.split()], check=True)
    assert one.run.airflow.answer()["state"] == "success"
