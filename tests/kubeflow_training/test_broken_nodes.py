"""On a cluster: a gang whose node says that its GPUs are broken blames it, and the next gang goes elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, from_kubeconfig
from kubeflow_training.jobs.kubernetes.logs import KubernetesLogs
from kubeflow_training.jobs.kubernetes.watching.feed import Feed
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, Reason, observe
from kubeflow_training.jobs.observation.phases import Observation
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.retries import RetryByCause, avoided
from kubernetes.client.exceptions import NotFoundException

from tests.kubeflow_training.rights import admin
from tests.kubeflow_training.situations import STUBBORN, Stage
from tests.kubeflow_training.test_avoid_nodes import machines, places
from tests.kubeflow_training.test_retries import context, failed

__all__ = ["machines"]  # a fixture
pytestmark = pytest.mark.cluster
XID = "NVRM: Xid (PCI:0000:91:00): 79, GPU has fallen off the bus."


class Gang:
    """Two pods on pretend nodes that run until they are told how to end."""

    def __init__(self, rights, label: str) -> None:
        from kubernetes import client

        self.core = client.CoreV1Api(admin())
        self.cluster, self.namespace = KubernetesCluster(rights.client()), rights.namespace
        self.name = f"job-{uuid.uuid4().hex[:8]}"
        manifest = pytorch_job(
            name=self.name,
            namespace=self.namespace,
            image="none",
            command=["none"],
            nodes=2,
            cpus=1,
            memory_gb=1,
            node_selector={"test.local/set": label},
            tolerations=[{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
        )
        self.uid = self.cluster.create(manifest).uid

    def until(self, wanted) -> Observation:
        end = time.monotonic() + 60
        while not wanted(seen := self.look()):
            assert time.monotonic() < end, seen
            time.sleep(0.1)
        return seen

    def look(self) -> Observation:
        snapshot = self.cluster.read(self.name, self.namespace)
        return observe(snapshot.job, snapshot.pods, snapshot.events)

    def node_of(self, rank: int) -> str:
        snapshot = self.cluster.read(self.name, self.namespace)
        return next(
            pod["spec"]["nodeName"] for pod in snapshot.pods if PYTORCH_JOB.node_rank(pod, snapshot.job) == rank
        )

    def end(self, code: int) -> None:
        """Both pods end with this code, or the operator removes the second, since the first has failed the job."""
        notes = {"metadata": {"annotations": {"test.local/exit-code": str(code), "test.local/ends-after": "0s"}}}
        for pod in self.cluster.read(self.name, self.namespace).pods:
            with suppress(NotFoundException):
                self.core.patch_namespaced_pod(pod["metadata"]["name"], self.namespace, notes)


def condition(core, node: str, kind: str, status: str) -> None:
    """What a node-problem-detector or an agent of the cloud writes."""
    found = {"type": kind, "status": status, "reason": "test", "message": XID}
    now = datetime.now(UTC).isoformat()
    found |= {"lastTransitionTime": now, "lastHeartbeatTime": now}
    core.patch_node_status(node, {"status": {"conditions": [found]}})


async def waited(kubeconfig, gang: Gang, code: int) -> Observation:
    """End the pods with this code; the job's end as a trigger sees it, which has waited for it."""
    cluster = AsyncCluster(lambda: from_kubeconfig(str(kubeconfig)))
    feed = Feed(cluster, gang.namespace, PYTORCH_JOB)
    feed.release = lambda: cluster
    news, log = feed.subscribe(gang.name, gang.uid), JobLog(lambda _: None)
    try:
        waiting = Waiting(
            gang.name, gang.uid, news, log, KubernetesLogs(cluster, PYTORCH_JOB, log, "none"), settle_seconds=2
        )
        end = asyncio.create_task(waiting.run())
        while waiting.observation is None or waiting.observation.phase is not Phase.RUNNING:
            assert not end.done()
            await asyncio.sleep(0.05)
        await asyncio.to_thread(gang.end, code)
        return (await asyncio.wait_for(end, 60)).observation
    finally:
        await news.close()


@pytest.mark.parametrize(("kind", "status"), [("GPUNeedsReplacement", "True"), ("AcceleratedHardwareReady", "False")])
def test_a_gang_on_a_broken_node_has_lost_it_and_the_next_goes_elsewhere(rights, machines, kind, status):
    label, _ = machines
    gang = Gang(rights, label)
    gang.until(lambda seen: seen.pods_running == 2)
    broken = gang.node_of(1)
    condition(gang.core, broken, kind, status)
    try:
        end = asyncio.run(waited(rights.kubeconfig, gang, 21))
        assert (end.phase, end.reason, end.node) == (Phase.FAILED, Reason.NODE_LOST, broken), end
        assert f"node {broken} has {kind}={status}: {XID}" in end.message
        ctx = context()
        verdict = RetryByCause().count(ctx, end, {"uid": gang.uid, "gang": 1})
        assert verdict.retry
        assert [item.node for item in avoided(ctx)] == [broken]
        assert broken not in places(rights, label, [item.node for item in avoided(ctx)], 3)
    finally:
        gang.cluster.delete(gang.name, gang.namespace)
        condition(gang.core, broken, kind, {"True": "False", "False": "True"}[status])


def test_without_the_right_to_nodes_it_is_as_before_with_one_line(fewer_rights, machines, caplog):
    label, _ = machines
    rights = fewer_rights("events")
    gang = Gang(rights, label)
    gang.until(lambda seen: seen.pods_running == 2)
    broken = gang.node_of(0)
    condition(gang.core, broken, "GPUNeedsReset", "True")
    try:
        with caplog.at_level(logging.INFO, "kubeflow_training"):
            gang.end(21)
            seen = gang.until(lambda seen: seen.ended and not seen.pods_running)
            gang.look()
        assert seen.reason is Reason.COLLECTIVE_TIMEOUT, seen
        said = [item.getMessage() for item in caplog.records if "rbac-nodes.yaml" in item.getMessage()]
        assert len(said) == 1
        assert 'cannot get resource "nodes"' in said[0]
    finally:
        gang.cluster.delete(gang.name, gang.namespace)
        condition(gang.core, broken, "GPUNeedsReset", "False")


@pytest.mark.outage  # other tests' gangs would read the taint, and take it for the end of their node
def test_a_pod_that_is_drained_from_a_node_that_its_cloud_takes_back_is_preempted(rights):
    stage = Stage(admin(), rights.namespace, rights.client())
    try:
        job = stage.submit(STUBBORN, grace_seconds=20)
        job.running()
        name = next(pod["spec"]["nodeName"] for pod in job.snapshot.pods if pod["metadata"]["name"] == job.pod(1))
        before = stage.core.read_node(name).to_dict()["spec"].get("taints") or []
        taints = [{"key": item["key"], "value": item.get("value"), "effect": item["effect"]} for item in before]
        # What aws-node-termination-handler does, but for the effect: other tests use the node.
        notice = {"key": "aws-node-termination-handler/spot-itn", "value": "i", "effect": "PreferNoSchedule"}
        stage.node(name, {"spec": {"taints": [*taints, notice]}})
        stage.later(lambda: stage.node(name, {"spec": {"taints": taints}}))
        pod = job.pod(1)
        body = {"metadata": {"name": pod, "namespace": stage.namespace}}
        stage.core.create_namespaced_pod_eviction(pod, stage.namespace, body)
        seen = job.until(lambda seen: seen.ended)
        assert (seen.reason, seen.node, seen.pod) == (Reason.PREEMPTED, name, pod), seen
        assert "spot-itn" in seen.message
        ctx = context()
        assert RetryByCause().evaluate(failed(seen.reason, node=seen.node), 1, 40, ctx).action.value == "retry"
        assert avoided(ctx) == []
    finally:
        stage.close()
