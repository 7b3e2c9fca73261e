"""Elastic jobs as values: manifest, sizes, and when a success counts. With real agents: `contract/test_elastic.py`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_training.jobs.elastic import (
    elastic,
    is_away,
    is_up,
    node_range,
    nodes_to_be_had,
    require_sizes,
    resized,
    unplaced_since,
    unproven,
)
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.checks.pytorch import check
from kubeflow_training.jobs.observation import Phase, observe


def manifest(nodes=3, **more):
    return pytorch_job(name="job", image="i", command=["torchrun", "train.py"], nodes=nodes, **more)


def ended(rank=0, code=0, message=None, state="terminated"):
    told = json.dumps({"exit_code": 0, "rank": rank}) if message is None else message
    return {
        "metadata": {"name": f"job-worker-{rank}", "labels": {"training.kubeflow.org/replica-type": "worker"}},
        "status": {"containerStatuses": [{"name": "pytorch", "state": {state: {"exitCode": code, "message": told}}}]},
    }


def succeeded(job, minutes=0):
    at = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
    done = {"type": "Succeeded", "status": "True", "lastTransitionTime": at}
    return {**job, "status": {"conditions": [done], "completionTime": at}}


def test_all_pods_become_workers_that_meet_by_c10d_without_an_autoscaler():
    found = elastic(manifest(restart_policy="Never"), min_nodes=2, restarts=4, rendezvous={"last_call_timeout": "5"})
    assert check(found) == []
    spec = found["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (3, "OnFailure")
    policy = spec["elasticPolicy"]
    assert (policy["rdzvBackend"], policy["minReplicas"], policy["maxReplicas"]) == ("c10d", 2, 3)
    assert "metrics" not in policy
    assert {"key": "last_call_timeout", "value": "5"} in policy["rdzvConf"]
    assert spec["runPolicy"]["backoffLimit"] == 4
    assert spec["runPolicy"]["cleanPodPolicy"] == "None"
    assert node_range(found) == (2, 3)
    assert node_range(manifest()) == (3, 3)


def test_the_given_manifest_is_left_as_it_is():
    given_one = manifest()
    before = json.dumps(given_one)
    elastic(given_one, min_nodes=1)
    resized(given_one, 1)
    assert json.dumps(given_one) == before


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3), (-1, None), (4, None)])
def test_what_is_no_range_is_refused(least, most):
    with pytest.raises(ManifestError, match="no range"):
        elastic(manifest(), min_nodes=least, max_nodes=most)


def test_a_gang_of_another_size():
    assert node_range(resized(manifest(3), 2)) == (2, 2)
    assert "Worker" not in resized(manifest(3), 1)["spec"]["pytorchReplicaSpecs"]
    assert resized(manifest(1), 3)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert resized(manifest(3), 3) == manifest(3)
    one = elastic(manifest(3), min_nodes=2)
    assert resized(one, 2)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    for size in (0, 1, 4):
        with pytest.raises(ManifestError, match="cannot run on"):
            resized(one, size)
    with pytest.raises(ManifestError):
        resized({"kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {}}}, 2)
    assert resized({"metadata": {"name": "x"}, "spec": {"trainer": {"numNodes": 4}}}, 2)["spec"]["trainer"] == {
        "numNodes": 2
    }


def test_a_gang_scheduler_waits_for_no_more_pods_than_there_are():
    whole = pytorch_job(name="job", image="i", command=["c"], nodes=3, scheduling={"minAvailable": 3, "queue": "q"})
    assert resized(whole, 2)["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2, "queue": "q"}
    assert resized(whole, 4)["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == 3


def test_which_jobs_can_start_again_with_fewer_nodes():
    require_sizes(manifest(3), 1, 3)
    require_sizes(manifest(3), 3, 3)
    require_sizes({"metadata": {"name": "x"}, "spec": {"trainer": {}}}, 2, None)
    for wrong, least, nodes, why in (
        (manifest(3), 4, 3, "it has 3 nodes"),
        (elastic(manifest(3), min_nodes=2), 2, 3, "elastic in place"),
        ({"kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {}}}, 1, 2, "no number of nodes"),
    ):
        with pytest.raises(ManifestError, match=why):
            require_sizes(wrong, least, nodes)


def test_since_when_a_pod_wants_a_node():
    def pod(second, node=None, **metadata):
        born = f"2026-01-01T00:00:{second:02d}Z"
        return {"metadata": {"creationTimestamp": born, **metadata}, "spec": {"nodeName": node} if node else {}}

    going = pod(1, deletionTimestamp="2026-01-01T00:00:02Z")
    assert unplaced_since([pod(0, "n"), pod(9), pod(5), going]).second == 5
    assert unplaced_since([pod(0, "n"), going]) is None


def test_success_counts_when_rank_0_reports():
    job = elastic(manifest(), min_nodes=2)
    assert unproven(job, [ended(1), ended(0)]) is None
    for pods in (
        [],
        [ended(1)],
        [ended(0, code=1)],
        [ended(0, state="running")],
        [ended(0, message="done")],
        [ended(0, message='{"exit_code": 1, "rank": 0}')],
        [ended(0, message='{"exit_code": 0, "rank": null}')],
        [ended(0, message='{"exit_code": 0, "rank": false}')],
        [ended(0, message="[0]")],
    ):
        assert "rank 0" in unproven(job, pods)
    assert unproven(manifest(), [ended(1)]) is None


def test_an_observed_success_without_the_report_is_awaited_then_retried():
    job = elastic(manifest(), min_nodes=2)
    still = {**ended(2, state="running"), "status": {**ended(2, state="running")["status"], "phase": "Running"}}
    assert observe(succeeded(job), [ended(0), still]).phase is Phase.SUCCEEDED
    assert observe(succeeded(job), [ended(1), still]).phase is Phase.RUNNING
    found = observe(succeeded(job, minutes=6), [ended(1), still])
    assert (found.phase, found.retryable) == (Phase.FAILED, True)
    assert observe(succeeded(job), [ended(1)]).phase is Phase.FAILED
    assert observe(succeeded(job), []).phase is Phase.FAILED
    unseen = observe(succeeded(job), [], pods_listed=False)
    assert (unseen.phase, "cannot be seen" in unseen.message) == (Phase.SUCCEEDED, True)
    assert observe(succeeded(manifest()), [ended(1)]).phase is Phase.SUCCEEDED


def test_an_elastic_gang_runs_while_the_least_of_its_pods_do():
    def pod(state, restarts=0):
        status = {"name": "pytorch", "state": {state: {"startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": restarts}
        return {"metadata": {"name": "p"}, "status": {"phase": "Running", "containerStatuses": [status]}}

    job = elastic(manifest(), min_nodes=2)
    up, away = pod("running", 1), pod("waiting", 2)
    assert (is_up(up), is_away(up), is_up(away), is_away(away)) == (True, False, False, True)
    assert observe(job, [up, up, away]).phase is Phase.RUNNING
    assert observe(job, [up, away, away]).phase is Phase.RESTARTING
    assert observe(manifest(), [up, up, pod("waiting")]).message == "3 of 3 pods run"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["metadata", "annotations", "spec", "status", "containerStatuses", "state", "conditions"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), ANYTHING, max_size=3))
def test_reading_never_raises(value):
    job = {"metadata": {"annotations": {"kubeflow-training/success": "rank-0-reports"}}}
    unproven(job, [value])
    unproven(value, [value])
    nodes_to_be_had([value])
    unplaced_since([value])
    node_range(value)
    is_up(value)
    is_away(value)
