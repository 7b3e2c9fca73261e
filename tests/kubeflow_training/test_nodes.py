"""A node that is known to be broken, or that its cloud takes back, explains a failure that nobody else explains."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from kubeflow_training.jobs.errors import JobForbiddenError
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes.watching.feed import Feed
from kubeflow_training.jobs.observation import Phase, Reason, observe
from kubeflow_training.jobs.observation.nodes import BROKEN, LEAVING, told
from kubeflow_training.jobs.observation.reader import nodes_to_ask
from kubeflow_training.jobs.observation.replicas import moments
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog

from tests.kubeflow_training.test_feed import Cluster, Logs, listed
from tests.kubeflow_training.test_observation import FAILED, ended, job, running

XID = "NVRM: Xid (PCI:0000:91:00): 79, GPU has fallen off the bus."
UNKNOWN, COLLECTIVE = 1, 21


def node(name, *conditions, taint=None):
    """A node as the API tells it. :param conditions: pairs of type and status."""
    found = [{"type": kind, "status": status, "message": XID} for kind, status in (("Ready", "True"), *conditions)]
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    spec = {"providerID": "x", **({"taints": taints} if taints else {})}
    return {"metadata": {"name": name, "labels": {"a": "b"}}, "spec": spec, "status": {"conditions": found}}


def on(pod, place):
    return {**pod, "spec": {"nodeName": place}}


def gang(code, other=None):
    """Rank 0 failed on n0; rank 1 on n1 runs, or has ended as given."""
    pods = [on(ended(0, code, at=5), "n0"), on(running(1) if other is None else ended(1, other, at=9), "n1")]
    return job("Running", workers=1), pods


def seen(code, *nodes, other=None):
    one, pods = gang(code, other)
    return observe(one, pods, [told(item) for item in nodes])


@pytest.mark.parametrize(("kind", "status"), BROKEN.items())
@pytest.mark.parametrize("code", [UNKNOWN, 137, COLLECTIVE])
def test_a_failure_that_nobody_explains_on_a_broken_node_is_the_nodes(kind, status, code):
    found = seen(code, node("n0", (kind, status)), node("n1"))
    assert (found.phase, found.reason, found.node, found.exit_code) == (Phase.FAILED, Reason.NODE_LOST, "n0", code)
    assert found.message.endswith(f"; node n0 has {kind}={status}: {XID}")
    assert "rank 0 (master-0) failed first on n0" in found.message


@pytest.mark.parametrize(("kind", "status"), BROKEN.items())
def test_a_condition_that_says_that_all_is_well_or_unknown_blames_nobody(kind, status):
    other = {"True": "False", "False": "True"}[status]
    for word in (other, "Unknown", None):
        assert seen(UNKNOWN, node("n0", (kind, word))).reason is Reason.UNKNOWN


@pytest.mark.parametrize(
    ("code", "reason"),
    [(10, Reason.USER_ERROR), (11, Reason.BAD_DATA), (127, Reason.USER_ERROR), (20, Reason.PREEMPTED)],
)
def test_a_failure_that_explains_itself_stays_what_it_is(code, reason):
    one, pods = gang(code)
    assert nodes_to_ask(one, pods, []) == []
    assert seen(code, node("n0", ("GPUNeedsReset", "True"), taint=min(LEAVING))).reason is reason


@pytest.mark.parametrize(("other", "code"), [(None, None), (COLLECTIVE, COLLECTIVE)])
def test_a_broken_collective_is_blamed_on_the_peer_whose_node_is_broken(other, code):
    found = seen(COLLECTIVE, node("n0"), node("n1", ("NVLinkBroken", "True")), other=other)
    assert (found.reason, found.node, found.pod) == (Reason.NODE_LOST, "n1", "job-worker-0")
    assert (found.replica, found.failing_rank, found.exit_code) == ("worker-0", 1, code)
    assert "failed first on n0" in found.message


def test_a_broken_peer_whose_pod_is_gone_is_blamed_by_its_node_alone():
    one, pods = gang(COLLECTIVE)
    found = observe(one, pods[:1], [told(node("n0")), told(node("n1", ("NVLinkBroken", "True")))])
    assert (found.reason, found.node, found.pod, found.exit_code) == (
        Reason.NODE_LOST,
        "n1",
        "job-master-0",
        COLLECTIVE,
    )


def test_what_failed_for_a_reason_of_its_own_is_not_blamed_on_a_peers_node():
    found = seen(UNKNOWN, node("n0"), node("n1", ("GPUNeedsReset", "True")))
    assert (found.reason, found.node) == (Reason.UNKNOWN, "n0")


def test_of_two_broken_nodes_that_of_the_first_failure_is_blamed():
    broken = [node(name, ("GPUNeedsReset", "True")) for name in ("n1", "n0")]
    assert seen(COLLECTIVE, *broken, other=COLLECTIVE).node == "n0"


@pytest.mark.parametrize("taint", sorted(LEAVING))
@pytest.mark.parametrize("code", [UNKNOWN, COLLECTIVE])
def test_a_node_that_its_cloud_takes_back_makes_it_a_preemption(taint, code):
    found = seen(code, node("n0", taint=taint))
    assert (found.reason, found.node) == (Reason.PREEMPTED, "n0")
    assert taint in found.message
    assert seen(code, node("n0", taint="nvidia.com/gpu")).reason is not Reason.PREEMPTED


def test_a_broken_node_that_is_taken_back_is_broken():
    found = seen(UNKNOWN, node("n0", ("AcceleratedHardwareReady", "False"), taint="karpenter.sh/disrupted"))
    assert found.reason is Reason.NODE_LOST


@pytest.mark.parametrize(
    ("sign", "before"), [("EvictionByEvictionAPI", Reason.EVICTED), ("DeletionByTaintManager", Reason.NODE_LOST)]
)
def test_a_pod_that_is_drained_from_a_node_that_leaves_is_preempted(sign, before):
    gone = on(running(1), "n1")
    gone["metadata"] = {**gone["metadata"], "deletionTimestamp": "2126-01-01T00:00:00Z"}
    gone["status"] = {
        **gone["status"],
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": sign, "message": "drained"}],
    }
    one, pods = job("Running", workers=1), [on(running(0), "n0"), gone]
    assert observe(one, pods).reason is before
    assert nodes_to_ask(one, pods, [])[0] == "n1"
    found = observe(one, pods, [told(node("n1", taint="aws-node-termination-handler/spot-itn"))])
    assert (found.phase, found.reason, found.node) == (Phase.FAILED, Reason.PREEMPTED, "n1")
    # Its pod is gone because somebody drained it, not because its GPUs failed the training.
    assert observe(one, pods, [told(node("n1", ("GPUNeedsReset", "True")))]).reason is before


def test_who_blamed_its_node_itself_is_not_called_preempted():
    assert seen(22, node("n0", taint="karpenter.sh/disrupted")).reason is Reason.NODE_LOST


def test_nodes_are_asked_only_for_a_failure_and_the_first_failures_before_the_others():
    one, pods = gang(UNKNOWN, other=UNKNOWN)
    assert nodes_to_ask(one, pods, []) == ["n0", "n1"]
    assert nodes_to_ask(one, [on(running(0), "n0"), on(running(1), "n1")], []) == []
    assert nodes_to_ask(one, [], []) == []
    assert nodes_to_ask(one, pods, [], ["n1", "n2"]) == ["n0", "n1", "n2"]
    crowd = [on(ended(rank, COLLECTIVE, at=1), f"n{rank}") for rank in range(200)]
    assert len(nodes_to_ask(job(FAILED, workers=199), crowd, [])) == 64


def test_a_node_that_is_no_node_is_harmless():
    one, pods = gang(UNKNOWN)
    for broken in ({}, {"kind": "Node"}, {"kind": "Node", "metadata": {"name": "n0"}, "status": {"conditions": 3}}):
        assert observe(one, pods, [broken]).reason is Reason.UNKNOWN
    assert told({})["metadata"]["name"] == ""


def test_of_a_node_travels_what_is_read_and_no_page_takes_it_for_an_event():
    found = told(node("n0", ("GPUNeedsReset", "True"), taint="t"))
    assert [item["type"] for item in found["status"]["conditions"]] == ["GPUNeedsReset"]
    assert "labels" not in found["metadata"]
    assert "providerID" not in found["spec"]
    assert [item.what for item in moments(job("Created"), [found])] == ["Created"]


def known_to_the_api(pods):
    for number, pod in enumerate(pods):
        pod["metadata"] |= {
            "namespace": "default",
            "uid": f"p{number}",
            "resourceVersion": "5",
            "labels": {**pod["metadata"]["labels"], PYTORCH_JOB.job_label: "job"},
            "ownerReferences": [{"uid": "u", "controller": True}],
        }


@pytest.mark.parametrize(("may_read", "late"), [(True, False), (True, True), (False, False)])
def test_who_waits_reads_the_nodes_of_a_failed_gang_or_says_once_that_it_may_not(may_read, late, caplog):
    one, pods = gang(COLLECTIVE, other=COLLECTIVE)
    one["metadata"] |= {"namespace": "default", "resourceVersion": "5"}
    known_to_the_api(pods)
    asked = []

    def answer(verb, path, params):
        if path.startswith("/api/v1/nodes/"):
            asked.append(path.rpartition("/")[2])
            if not may_read:
                raise JobForbiddenError("node", "the cluster refuses it (403)", "Give the account the rights")
            broken = asked[-1] == "n1" and not (late and asked.count("n1") == 1)
            return node(asked[-1], *([("GPUNeedsReplacement", "True")] if broken else []))
        if path.endswith("/pytorchjobs/job"):
            return one
        return listed(one) if path.endswith("/pytorchjobs") else listed(*pods if path.endswith("/pods") else ())

    async def wait(feed):
        news = feed.subscribe("job", "u")
        try:
            return await Waiting("job", "u", news, JobLog(lambda _: None), Logs(), settle_seconds=0.1).run()
        finally:
            await news.close()

    async def main():
        feed = Feed(Cluster(answer), "default", PYTORCH_JOB)
        held = feed.subscribe("another")  # keeps the feed, as other tasks of a process do
        try:
            return [await wait(feed) for _ in range(2)]
        finally:
            await held.close()

    with caplog.at_level(logging.INFO):
        ends = asyncio.run(asyncio.wait_for(main(), 20))
    said = [record for record in caplog.records if "rbac-nodes.yaml" in record.getMessage()]
    for end in ends:
        assert end.observation.phase is Phase.FAILED
        expected = (Reason.NODE_LOST, "n1") if may_read else (Reason.COLLECTIVE_TIMEOUT, "n0")
        assert (end.observation.reason, end.observation.node) == expected
    assert len(said) == (0 if may_read else 1)
    assert set(asked) == ({"n0", "n1"} if may_read else {"n0"})
    assert may_read or len(asked) == 1


@pytest.mark.parametrize("told_by", ["watch", "list"])
def test_the_node_of_a_pod_that_is_removed_before_the_job_is_seen_to_have_failed_is_asked(told_by):
    one, pods = gang(COLLECTIVE)
    fine = {**one, "metadata": {**one["metadata"], "namespace": "default", "resourceVersion": "5"}}
    failed = {**job(FAILED, workers=1), "metadata": {**fine["metadata"], "resourceVersion": "6"}}
    known_to_the_api(pods)
    began = {**pods[0], "status": on(running(0), "n0")["status"]}
    after = {**pods[0], "metadata": {**pods[0]["metadata"], "resourceVersion": "6"}}
    now = [fine, [began, pods[1]]]

    def answer(verb, path, params):
        if path.startswith("/api/v1/nodes/"):
            name = path.rpartition("/")[2]
            return node(name, *([("NVLinkBroken", "True")] if name == "n1" else []))
        if path.endswith("/pytorchjobs/job"):
            return now[0]
        return listed(now[0]) if path.endswith("/pytorchjobs") else listed(*now[1] if path.endswith("/pods") else ())

    async def main():
        feed = Feed(Cluster(answer), "default", PYTORCH_JOB)
        news = feed.subscribe("job", "u")
        waiting = Waiting("job", "u", news, JobLog(lambda _: None), Logs(), settle_seconds=0.1)
        end = asyncio.create_task(waiting.run())
        try:
            while waiting.observation is None or not waiting.observation.pods_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            now[:] = failed, [after]
            if told_by == "watch":
                feed._pod_changed("DELETED", pods[1])
            else:
                feed._pods_listed([after], time.monotonic())
            feed._job_changed("MODIFIED", failed)
            return await end
        finally:
            await news.close()
            assert not feed._gone

    found = asyncio.run(asyncio.wait_for(main(), 20)).observation
    assert (found.reason, found.node) == (Reason.NODE_LOST, "n1"), found
