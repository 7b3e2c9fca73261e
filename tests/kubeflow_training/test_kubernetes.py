"""The Kubernetes backend against a real cluster with the training operator. Needs KUBECONFIG and an image with a shell.

`KUBEFLOW_TRAINING_TEST_IMAGE` names the image (default `test.local/shell:1`); it is not pulled.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest
from kubeflow_training.jobs.errors import BackendUnavailableError, JobExistsError, JobRefusedError
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.kubernetes.cluster import nanoseconds
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, Reason, observe
from kubeflow_training.jobs.watch import Watch, last_lines

IMAGE = os.environ.get("KUBEFLOW_TRAINING_TEST_IMAGE", "test.local/shell:1")


def reachable() -> bool:
    return Path(os.environ.get("KUBECONFIG", "/none")).is_file()


needs_cluster = pytest.mark.skipif(not reachable(), reason="KUBECONFIG names no cluster")


@pytest.fixture
def cluster():
    return KubernetesCluster()


@pytest.fixture
def submit(cluster):
    """Creates jobs that run a shell script on every pod; they are gone after the test."""
    names = []

    def create(script: str, **more):
        name = f"test-{uuid.uuid4().hex[:8]}"
        values = {"cpus": 0.05, "memory_gb": 0.05, "grace_seconds": 2} | more
        manifest = pytorch_job(name=name, image=IMAGE, command=["/bin/sh", "-c", script], **values)
        manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = (
            "IfNotPresent"
        )
        names.append(name)
        return cluster.create(manifest), manifest

    yield create
    for name in names:
        cluster.delete(name, "default", grace_seconds=0)


def follow(cluster, snapshot, seconds=120):
    """All log lines and the last observation."""
    watch = Watch(lambda: cluster, snapshot.job["metadata"]["name"], "default", uid=snapshot.uid)
    lines, end = [], time.monotonic() + seconds
    while True:
        step = watch.step()
        lines += step.lines
        if step.final:
            return lines, step.observation, watch
        assert time.monotonic() < end, lines
        time.sleep(0.5)


def gone(cluster, name, seconds=60):
    end = time.monotonic() + seconds
    while cluster.read(name, "default") is not None:
        assert time.monotonic() < end
        time.sleep(0.2)


@needs_cluster
@pytest.mark.cluster
def test_a_gang_succeeds_with_all_of_its_log(cluster, submit):
    script = 'i=0; while [ $i -lt 300 ]; do echo "$RANK $i"; i=$((i+1)); done; sleep 2; echo "end $RANK of $WORLD_SIZE"'
    snapshot, _ = submit(script, nodes=2)
    lines, seen, _ = follow(cluster, snapshot)
    assert (seen.phase, seen.pods_wanted) == (Phase.SUCCEEDED, 2)
    for replica, rank in (("master-0", 0), ("worker-0", 1)):
        mine = [line.removeprefix(f"[{replica}] ") for line in lines if line.startswith(f"[{replica}]")]
        assert mine == [f"{rank} {n}" for n in range(300)] + [f"end {rank} of 2"]


@needs_cluster
@pytest.mark.cluster
def test_a_failure_names_rank_code_node_and_words(cluster, submit):
    script = (
        'if [ "$RANK" = 1 ]; then echo reading; '
        'echo \'{"exit_code": 11, "message": "shard 3 is broken", "rank": 1}\' > /dev/termination-log; exit 11; fi; '
        "sleep 600"
    )
    snapshot, _ = submit(script, nodes=2)
    _, seen, watch = follow(cluster, snapshot)
    assert (seen.phase, seen.reason, seen.exit_code, seen.replica) == (Phase.FAILED, Reason.BAD_DATA, 11, "worker-0")
    assert seen.node
    assert "shard 3 is broken" in seen.message
    assert last_lines(cluster, watch.snapshot, seen.pod) == ["reading"]


@needs_cluster
@pytest.mark.cluster
def test_delete_removes_the_whole_gang_and_frees_the_name(cluster, submit):
    snapshot, manifest = submit("sleep 600", nodes=2)
    name = manifest["metadata"]["name"]
    end = time.monotonic() + 60
    while observe((now := cluster.read(name, "default")).job, now.pods, now.events).phase is not Phase.RUNNING:
        assert time.monotonic() < end
        time.sleep(0.5)
    with pytest.raises(JobExistsError):
        cluster.create(manifest)
    assert cluster.delete(name, "default", uid=str(uuid.uuid4())) is False
    assert cluster.delete(name, "default", uid=snapshot.uid) is True
    gone(cluster, name)
    again = cluster.create(manifest)
    assert again.uid != snapshot.uid
    assert cluster.delete("no-such-job", "default") is False


@needs_cluster
@pytest.mark.cluster
def test_a_refusal_has_the_clusters_own_words(cluster, submit):
    manifest = pytorch_job(name="refused", image=IMAGE, command=["true"], namespace="no-such-namespace")
    with pytest.raises(JobRefusedError, match="no-such-namespace"):
        cluster.create(manifest)


@needs_cluster
@pytest.mark.cluster
def test_an_image_that_does_not_exist_ends_the_wait(cluster, submit):
    manifest = pytorch_job(
        name=f"test-{uuid.uuid4().hex[:8]}", image="test.local/none:1", command=["true"], cpus=0.05, memory_gb=0.05
    )
    snapshot = cluster.create(manifest)
    try:
        _, seen, _ = follow(cluster, snapshot)
        assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.IMAGE, False)
    finally:
        cluster.delete(manifest["metadata"]["name"], "default", uid=snapshot.uid)


@needs_cluster
@pytest.mark.cluster
def test_too_much_asked_waits_with_the_schedulers_words(cluster, submit):
    _, manifest = submit("true", cpus=500)
    end = time.monotonic() + 60
    while True:
        now = cluster.read(manifest["metadata"]["name"], "default")
        seen = observe(now.job, now.pods, now.events)
        if "nsufficient cpu" in seen.message:
            break
        assert time.monotonic() < end, seen
        time.sleep(0.5)
    assert seen.phase is Phase.QUEUED


def test_an_unreachable_cluster_says_nothing_about_the_job():
    from kubernetes import client

    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = False
    cluster = KubernetesCluster(client.ApiClient(configuration))
    with pytest.raises(BackendUnavailableError):
        cluster.read("job", "default")


def test_time_stamps_with_every_number_of_digits():
    base = 1767225600 * 10**9
    assert nanoseconds("2026-01-01T00:00:00Z") == base
    assert nanoseconds("2026-01-01T00:00:00.123456789Z") == base + 123456789
    assert nanoseconds("2026-01-01T02:00:00.5+02:00") == base + 500_000_000
    assert nanoseconds("not a stamp") is None
    assert nanoseconds("2026-13-01T00:00:00Z") is None
