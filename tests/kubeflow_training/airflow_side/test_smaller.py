"""A gang that does not get all its nodes starts again with those there are, and the one after it is whole again."""

from __future__ import annotations

import signal
import time

import pytest
from kubeflow_training.gangs.memory import SIZE_KEY
from kubeflow_training.jobs.elastic import elastic, nodes_to_be_had
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.words import FINGERPRINT_ANNOTATION, TOKEN_ANNOTATION
from kubeflow_training.jobs.observation import Phase, observe
from kubeflow_training.retries import LEDGER_KEY

from tests.kubeflow_training.pretend_nodes import until_ready
from tests.kubeflow_training.rights import admin

both = pytest.mark.parametrize("mode", ["deferred", "sync"])


@pytest.fixture
def other(airflow):
    """A job that takes half of the machine until this is called; it has its pod, or is gone, when a test goes on."""
    cluster, name = airflow.cluster, "takes-half"

    def until(reached):
        end = time.monotonic() + 150
        while not reached(cluster.read(name, "default")):
            assert time.monotonic() < end
            time.sleep(0.02)

    def leave():
        cluster.delete(name, "default", grace_seconds=0)
        until(lambda job: job is None)

    half = pytorch_job(
        name=name, image="x", command=["python", "-c", "import time; time.sleep(600)"], cpus=2, memory_gb=0.2
    )
    cluster.create(half)
    until(lambda job: observe(job.job, job.pods, job.events).phase is Phase.RUNNING)
    yield leave
    leave()


@both
def test_a_gang_starts_at_the_size_that_fits_and_regrows_with_the_next(new_run, other, mode, tmp_path):
    go = tmp_path / "go"
    script = (
        "import os, sys, time\nprint('gang of', os.environ['WORLD_SIZE'], flush=True)\n"
        "if os.environ['WORLD_SIZE'] == '2':\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "    sys.exit(21)"
    )
    run = new_run(f"{mode}_smaller", script, nodes=3)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("up_for_retry", "JobFailed")
    assert "too few nodes: only 2 of 3 pods got a node in time" in end["error"]
    assert "attempt 1: too few nodes: retry 1 of 3; next attempt in 1 s" in run.airflow.log()
    run.until(lambda: run.job() is None)
    assert run.look()["store"][SIZE_KEY]["nodes"] == 2

    run.begin_attempt()
    run.until(lambda: run.phase() is Phase.RUNNING)
    gang = run.job()
    assert gang.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    if mode == "sync":
        # The smaller gang is found again after its worker died.
        run.airflow.signal(signal.SIGKILL)
        run.begin_attempt()
        run.until(lambda: "adopt (attempt 2 is running" in run.airflow.log())
    go.touch()
    assert run.airflow.answer()["state"] == "up_for_retry"
    assert run.job().uid == gang.uid
    identity = run.look()["store"]["pytorch_job"]
    notes = gang.annotations
    assert (identity["gang"], identity["uid"]) == (2, gang.uid)
    assert (identity["fingerprint"], identity["token"]) == (notes[FINGERPRINT_ANNOTATION], notes[TOKEN_ANNOTATION])

    other()
    assert run.attempt()["state"] == "success"
    assert run.look()["xcoms"]["return_value"]["gang"] == 3
    assert "[master-0] gang of 3" in run.airflow.log()
    causes = [item["reason"] for item in run.look()["store"][LEDGER_KEY]["failures"]]
    assert causes == ["too few nodes", "collective timeout"]


def test_a_clear_starts_whole_again(new_run, other):
    run = new_run("deferred_smaller", "import os; print('gang of', os.environ['WORLD_SIZE'])", nodes=3)
    assert run.attempt()["state"] == "up_for_retry"
    run.airflow.ask("clear", dag=run.dag, run=run.run)
    other()
    assert run.attempt()["state"] == "success"
    assert "gang of 3" in run.airflow.log()
    assert "gang of 2" not in run.airflow.log()


def test_where_too_few_nodes_are_free_the_wait_just_ends(new_run, other):
    run = new_run("deferred_smaller", "print(1)", nodes=3, cpus=1.3)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "AirflowTaskTimeout")
    assert SIZE_KEY not in run.look()["store"]


def test_a_job_that_is_elastic_in_place_takes_no_least_size(new_run):
    run = new_run("deferred_smaller", "print(1)", nodes=3)
    changed = elastic(run.manifest, min_nodes=2)
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf={"manifest": changed, "backend": "local"})
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "Remove one of them" in end["error"]


@pytest.fixture
def machine(rights):
    """A pretend node for two pods."""
    from kubernetes import client

    core, name = client.CoreV1Api(admin()), f"machine-{rights.namespace}"
    size = {"cpu": "8", "memory": "8G", "nvidia.com/gpu": "2", "pods": "10"}
    core.create_node(
        {
            "metadata": {
                "name": name,
                "labels": {"kubernetes.io/hostname": name},
                "annotations": {"kwok.x-k8s.io/node": "fake"},
            },
            "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
            "status": {"capacity": size, "allocatable": size},
        }
    )
    until_ready(core, f"kubernetes.io/hostname={name}")
    yield name
    core.delete_node(name)


@pytest.mark.cluster
def test_the_same_on_kubernetes_where_a_part_of_the_gang_runs_already(new_run, airflow, rights, machine):
    rights.write(airflow.other_kubeconfig)
    cluster = KubernetesCluster(rights.client())
    run = new_run(
        "deferred_smaller",
        "true",
        backend="kubernetes",
        namespace=rights.namespace,
        nodes=3,
        cpus=0.1,
        memory_gb=0.1,
        gpus=1,
        spread="any",
        join_timeout_seconds=0,
        node_selector={"kubernetes.io/hostname": machine},
        tolerations=[{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    )
    run.begin_attempt()
    run.until(lambda: (now := cluster.read(run.name, rights.namespace)) and nodes_to_be_had(now.pods) == 2)
    end = run.airflow.answer()
    assert (end["state"], end["kind"]) == ("up_for_retry", "JobFailed")
    assert "too few nodes: only 2 of 3 pods got a node in time" in end["error"]
    name = f"{run.name}-g2"
    run.begin_attempt()
    run.until(lambda: (now := cluster.read(name, rights.namespace)) and observe(now.job, now.pods).pods_running == 2)
    cluster.delete(name, rights.namespace, grace_seconds=0)
    assert run.airflow.answer()["state"] == "failed"
    assert "attempt 2 starts with 2 nodes" in run.airflow.log()
