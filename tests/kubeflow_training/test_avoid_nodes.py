"""A gang that comes after a failure of hardware goes elsewhere, and nowhere else if there is no elsewhere."""

from __future__ import annotations

import time
import uuid

import pytest
from kubeflow_training.jobs.avoid import away_from
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job

from tests.kubeflow_training.pretend_nodes import until_ready
from tests.kubeflow_training.rights import admin

pytestmark = pytest.mark.cluster
NODES = 4


@pytest.fixture(scope="module")
def machines():
    """Pretend nodes that no other test uses: their label and their names."""
    from kubernetes import client

    core = client.CoreV1Api(admin())
    if not core.list_node(label_selector="type=kwok").items:
        pytest.skip("the cluster has no pretend nodes (KWOK)")
    label = f"avoid-{uuid.uuid4().hex[:8]}"
    names = [f"{label}-{number}" for number in range(NODES)]
    size = {"cpu": "8", "memory": "32G", "pods": "110"}
    for name in names:
        core.create_node(
            {
                "metadata": {
                    "name": name,
                    "labels": {"test.local/set": label, "kubernetes.io/hostname": f"host-of-{name}"},
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                },
                "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
                "status": {"capacity": size, "allocatable": size},
            }
        )
    until_ready(core, f"test.local/set={label}")
    yield label, names
    for name in names:
        core.delete_node(name)


def places(rights, label, avoided, pods):
    """The nodes that a gang gets which would rather not get some."""
    cluster = KubernetesCluster(rights.client())
    name = f"job-{uuid.uuid4().hex[:8]}"
    manifest = pytorch_job(
        name=name,
        namespace=rights.namespace,
        image="none",
        command=["none"],
        nodes=pods,
        cpus=1,
        memory_gb=1,
        spread="any",
        node_selector={"test.local/set": label},
        tolerations=[{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    )
    cluster.create(away_from(manifest, avoided))
    try:
        end = time.monotonic() + 60
        while True:
            found = [pod["spec"].get("nodeName") for pod in cluster.read(name, rights.namespace).pods]
            if len(found) == pods and all(found):
                return set(found)
            assert time.monotonic() < end, found
            time.sleep(0.2)
    finally:
        cluster.delete(name, rights.namespace)


def test_avoided_nodes_get_no_pod_while_there_are_others(rights, machines):
    label, names = machines
    assert places(rights, label, names[:3], 4) == {names[3]}
    assert places(rights, label, names[1:], 4) == {names[0]}


def test_an_avoided_node_is_better_than_none(rights, machines):
    label, names = machines
    assert places(rights, label, names, 2) <= set(names)
