"""Which GPUs the local cluster finds, and which pod gets which."""

from __future__ import annotations

import pytest
from kubeflow_training.jobs.local.devices import detected, devices
from kubeflow_training.jobs.observation import Phase

TELL = "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')), flush=True)"
STAY = f"{TELL}; import time; time.sleep(60)"


def told(cluster, name):
    """What the job's pods see, as sets of indices."""
    return [set(eval(cluster.log(name, index)[0]).split(",")) for index in range(len(cluster.read(name).pods))]


def started(cluster, name):
    cluster.wait(Phase.RUNNING, name=name)
    cluster.until(lambda: all(cluster.log(name, index) for index in range(len(cluster.read(name).pods))))
    return told(cluster, name)


def test_every_running_pod_has_gpus_of_its_own(stopped_cluster):
    cluster = stopped_cluster
    cluster.start(cpus=8, gpus=6)
    cluster.submit(STAY, "two", nodes=2, gpus=2)
    cluster.submit(STAY, "one", gpus=1)
    cluster.submit(STAY, "none")
    pods = [*started(cluster, "two"), *started(cluster, "one")]
    assert [len(pod) for pod in pods] == [2, 2, 1]
    assert len(set.union(*pods)) == 5
    assert set.union(*pods) <= {"0", "1", "2", "3", "4", "5"}
    assert started(cluster, "none") == [{""}]
    cluster.submit(TELL, "waits", gpus=2)
    seen = cluster.until(lambda: found if "gpu" in (found := cluster.observe("waits")).message else None)
    assert (seen.phase, seen.message) == (Phase.QUEUED, "waiting for 1 gpu")
    cluster.client.delete("one", "default", grace_seconds=0)
    assert cluster.ended("waits").phase is Phase.SUCCEEDED
    assert not set.union(*told(cluster, "waits")) & set.union(*pods[:2])


def test_gpus_stay_with_their_pod_over_a_sigkill_of_the_supervisor_and_are_freed_at_its_end(stopped_cluster):
    cluster = stopped_cluster
    cluster.start(gpus=3)
    cluster.submit(STAY, "first", gpus=2)
    (first,) = started(cluster, "first")
    cluster.kill()
    cluster.start(gpus=3)
    cluster.submit(STAY, "second", gpus=1)
    (second,) = started(cluster, "second")
    assert not first & second
    cluster.submit(TELL, "third", gpus=3)
    cluster.until(lambda: "waiting for 3 gpus" in cluster.observe("third").message)
    cluster.kill()
    for name in ("first", "second"):
        cluster.client.delete(name, "default", grace_seconds=0)
    cluster.start(gpus=3)
    assert cluster.ended("third").phase is Phase.SUCCEEDED
    assert told(cluster, "third") == [{"0", "1", "2"}]


def test_without_gpus_the_variable_is_left_alone_and_a_gpu_job_is_refused(stopped_cluster, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = stopped_cluster
    cluster.start(gpus=0)
    cluster.submit(TELL)
    cluster.ended()
    assert cluster.log() == ["None"]
    cluster.submit(TELL, "gpu", gpus=1)
    seen = cluster.ended("gpu")
    assert (seen.phase, seen.retryable) == (Phase.FAILED, False)
    assert "1 gpu too few" in seen.message


@pytest.mark.parametrize(
    ("env", "here", "found"),
    [
        ({}, 0, []),
        ({}, 2, ["0", "1"]),
        ({"KUBEFLOW_TRAINING_GPUS": "3"}, 0, ["0", "1", "2"]),
        ({"KUBEFLOW_TRAINING_GPUS": "0"}, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, 8, ["2", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "2,9"}, 8, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 8, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a, MIG-2b"}, 8, ["GPU-1a", "MIG-2b"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6", "KUBEFLOW_TRAINING_GPUS": "2"}, 8, ["4", "5"]),
    ],
)
def test_the_machines_gpus(env, here, found):
    assert devices(env, lambda: here) == found


def test_detection_needs_no_framework_and_never_fails():
    assert detected() >= 0
