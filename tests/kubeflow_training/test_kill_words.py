"""What a task says about its job when it was ended, after it has tried to delete it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import kubeflow_training.ending
import pytest
from airflow.sdk.exceptions import AirflowNotFoundException
from kubeflow_training import triggers
from kubeflow_training.exceptions import TaskStopped
from kubeflow_training.gangs.memory import STATE_KEY
from kubeflow_training.gangs.reattach import identity
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.triggers import PyTorchJobTrigger

MANIFEST = pytorch_job(name="job", image="x", command=["true"])
JOB = replace(identity(MANIFEST, Owner("dag", "run", "train"), "1.0"), uid="u", backend="kubernetes:old")
AWAY = BackendUnavailableError("job default/job", "the cluster cannot be reached", "It is tried again")


@pytest.fixture
def cluster(monkeypatch):
    """Where jobs are deleted; its `troubles` are raised before that, one by one."""
    found = SimpleNamespace(deleted=[], troubles=[], asked=0)

    class Backend:
        def __init__(self, hook):
            self.hook = hook

        def read(self, name, namespace):
            return None

        def delete(self, name, namespace, *, uid):
            found.asked += 1
            if found.troubles:
                raise found.troubles.pop(0)
            found.deleted.append((self.hook.kubernetes_conn_id, name, uid))
            return True

    monkeypatch.setattr(PyTorchJobHook, "connect", lambda hook: Backend(hook))
    return found


def killed(monkeypatch, stored, *, state="failed", tries=(1, 3)):
    """A kill while an attach waits for the cluster: it has no job yet, an earlier try has."""
    monkeypatch.setattr(kubeflow_training.ending, "task_state", lambda _: state)
    task = PyTorchJobOperator(task_id="train", manifest=MANIFEST, kubernetes_conn_id="new")
    store = {STATE_KEY: stored.to_dict()} if stored else {}
    ti = SimpleNamespace(
        dag_id="dag", run_id="run", task_id="train", map_index=-1, try_number=tries[0], max_tries=tries[1]
    )
    context = {"task_state_store": store, "ti": ti}
    task.on_kill()
    with pytest.raises(TaskStopped) as told:
        task._gangs(context, MANIFEST)._still_wanted()
    return str(told.value)


def test_a_kill_before_the_job_was_found_again_deletes_that_of_the_earlier_try(cluster, monkeypatch):
    assert killed(monkeypatch, JOB) == "the task was ended (failed), and its job with it"
    assert cluster.deleted == [("old", "job", "u")]


@pytest.mark.parametrize("trouble", [AWAY, AirflowNotFoundException("The conn_id `old` isn't defined")])
def test_a_kill_whose_deletion_fails_says_so(cluster, monkeypatch, trouble):
    cluster.troubles = [trouble]
    told = killed(monkeypatch, JOB)
    assert told == "the task was ended (failed), and its job default/job could not be deleted and may still run"
    cluster.troubles = [trouble]
    assert "no try is left, and its job default/job could not be deleted" in killed(
        monkeypatch, JOB, state="running", tries=(4, 3)
    )


@pytest.mark.parametrize("stored", [None, replace(JOB, uid=None)], ids=["none stored", "never created"])
def test_a_kill_before_there_was_a_job_claims_none(cluster, monkeypatch, stored):
    assert killed(monkeypatch, stored) == "the task was ended (failed), and no job of it is known"
    assert cluster.deleted == []


def test_a_stop_with_tries_left_deletes_nothing(cluster, monkeypatch):
    assert "the job continues, and a retry finds it" in killed(monkeypatch, JOB, state="running")
    assert cluster.asked == 0


def end_deferred(monkeypatch):
    monkeypatch.setattr(triggers, "task_state", lambda _: "failed")
    monkeypatch.setattr(triggers, "_PAUSE", 0.01)
    trigger = PyTorchJobTrigger(name="job", namespace="default", uid="u", kubernetes_conn_id="old")
    asyncio.run(trigger.on_kill())


def test_the_triggerer_tries_to_delete_again_and_says_so_after(cluster, monkeypatch, capsys):
    cluster.troubles = [AWAY, AWAY]
    end_deferred(monkeypatch)
    assert cluster.deleted == [("old", "job", "u")]
    assert "job default/job is deleted" in capsys.readouterr().out


def test_the_triggerer_does_not_claim_a_deletion_that_failed(cluster, monkeypatch, capsys):
    cluster.troubles = [AWAY] * 100
    end_deferred(monkeypatch)
    assert 1 < cluster.asked < 10
    said = capsys.readouterr().out
    assert "job default/job could not be deleted and may still run" in said
    assert "is deleted" not in said
