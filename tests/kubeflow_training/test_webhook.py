"""On a real cluster: what the webhook refuses, the checks refuse before; 2 pods of 2 ranks with a late master."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.checks.pytorch import check
from kubeflow_training.jobs.manifest.text import manifest_to_text
from kubeflow_training.jobs.observation import Phase, Reason, observe
from kubeflow_training.jobs.render import render
from kubeflow_training.jobs.spec import ElasticPolicy

pytestmark = pytest.mark.cluster


def build(namespace, **more):
    values = {"name": f"hook-{uuid.uuid4().hex[:8]}", "namespace": namespace, "image": "test.local/shell:1"}
    return pytorch_job(**(values | {"command": ["true"], "cpus": 0.05, "memory_gb": 0.05} | more))


def replicas(manifest):
    return manifest["spec"]["pytorchReplicaSpecs"]


def container(manifest, kind="Master"):
    return replicas(manifest)[kind]["template"]["spec"]["containers"][0]


REFUSED = {
    "name": lambda m: m["metadata"].update(name="1-train"),
    "dots in the name": lambda m: m["metadata"].update(name="train.one"),
    "no replicas": lambda m: m["spec"].pop("pytorchReplicaSpecs"),
    "another replica": lambda m: replicas(m).update(Boss=replicas(m)["Master"]),
    "no containers": lambda m: replicas(m)["Worker"]["template"]["spec"].update(containers=[]),
    "no container pytorch": lambda m: container(m, "Worker").update(name="main"),
    "no image": lambda m: container(m).update(image=""),
    "masters": lambda m: replicas(m)["Master"].update(replicas=2),
    "master without a number": lambda m: replicas(m)["Master"].pop("replicas"),
    "no workers": lambda m: replicas(m)["Worker"].update(replicas=0),
    "manager": lambda m: m["spec"]["runPolicy"].update(managedBy="somebody"),
    "processes as a number": lambda m: m["spec"].update(nprocPerNode=2),
    "replicas as text": lambda m: replicas(m)["Worker"].update(replicas="two"),
    "a deadline in words": lambda m: m["spec"]["runPolicy"].update(activeDeadlineSeconds="soon"),
    "suspend in words": lambda m: m["spec"]["runPolicy"].update(suspend="yes"),
    "elastic without workers": lambda m: replicas(m).pop("Worker") and m["spec"].update(elasticPolicy={}),
    "processes said twice": lambda m: m["spec"].update(elasticPolicy={"minReplicas": 1, "nProcPerNode": 1}),
    "a variable's value that is a number": lambda m: container(m)["env"].append({"name": "A", "value": 1}),
    "a command that is a line": lambda m: container(m).update(command="true"),
}


@pytest.fixture(scope="module")
def server(rights):
    """Creates a manifest as the API server would, without keeping it; its refusal, or None."""
    from kubernetes.client import CustomObjectsApi
    from kubernetes.client.exceptions import ApiException

    api = CustomObjectsApi(rights.client())

    def ask(manifest):
        try:
            api.create_namespaced_custom_object(
                "kubeflow.org", "v1", rights.namespace, "pytorchjobs", manifest, dry_run="All"
            )
        except ApiException as error:
            if not 400 <= error.status < 500:
                raise
            return error.body
        return None

    return ask


def test_what_the_builder_makes_passes(server, namespace):
    rich = {
        "nodes": 3,
        "gpus": 2,
        "queue": "team",
        "spread": "one_per_node",
        "scheduling": {"minAvailable": 3},
        "mlflow_run": "abc",
        "service_account": "x",
        "backoff_limit": 1,
        "image_pull_secrets": ["x"],
        "resources": {"rdma/hca": 1},
    }
    for more in ({}, rich, {"nodes": 3, "elastic": ElasticPolicy(min_nodes=2)}):
        manifest = build(namespace, **more)
        assert check(manifest) == []
        assert server(manifest) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_server_refuses_the_checks_refuse_before(server, namespace, name):
    manifest = build(namespace, nodes=3)
    REFUSED[name](manifest)
    assert server(manifest) is not None
    assert check(manifest) != []


def test_a_refusal_that_no_check_knows_has_the_servers_own_words(rights):
    manifest = build(rights.namespace)
    manifest["metadata"]["labels"]["a label"] = "x"
    assert check(manifest) == []
    with pytest.raises(JobRefusedError, match=r"a label.*must consist of alphanumeric"):
        KubernetesCluster(rights.client()).create(manifest)


def test_a_kind_that_the_cluster_does_not_know_is_named_with_its_mend(rights):
    from tests.kubeflow_training.rights import admin

    missing = replace(PYTORCH_JOB, group="missing.example.org")
    cluster = KubernetesCluster(admin(), missing)
    for ask in (lambda: cluster.jobs(rights.namespace), lambda: cluster.read("x", rights.namespace)):
        with pytest.raises(JobRefusedError, match=r"[Ii]nstall"):
            ask()


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
def test_a_rendered_manifest_trains_with_kubectl_alone(rights):
    name = f"rendered-{uuid.uuid4().hex[:8]}"
    spec = {"name": name, "namespace": rights.namespace, "image": "test.local/shell:1", "cpus": 0.05, "memory_gb": 0.05}
    text = render(manifest_to_text({**spec, "command": ["sh", "-c", "echo $RANK of $WORLD_SIZE"], "nodes": 2}))
    kubectl = ["kubectl", "--kubeconfig", str(rights.kubeconfig)]
    subprocess.run([*kubectl, "create", "-f", "-"], input=text, text=True, check=True, capture_output=True)
    cluster, end = KubernetesCluster(rights.client()), time.monotonic() + 100
    while not (seen := observe((now := cluster.read(name, rights.namespace)).job, now.pods, now.events)).ended:
        assert time.monotonic() < end, seen
        time.sleep(0.5)
    assert seen.phase is Phase.SUCCEEDED
    assert cluster.tail(now.pods[0], 5) == ["0 of 2"]


def test_two_pods_of_two_ranks_wait_for_a_late_master_and_tell_the_ranks_own_code(rights):
    """Torch comes from this machine, so the node has to be this machine too."""
    script = (
        "import os, torch, torch.distributed as d\n"
        "d.init_process_group('gloo')\n"
        "one = torch.ones(1)\n"
        "d.all_reduce(one)\n"
        "os.write(1, b'ranks %d\\n' % int(one))\n"  # in one piece, as two ranks share the log
        "if d.get_rank() == 3: os._exit(11)\n"
        "d.barrier()\n"
    )
    folders = [
        sys.prefix,
        sys.base_prefix,
        *(path for path in ("/usr", "/lib", "/lib64", "/bin") if Path(path).exists()),
    ]
    python = f"{sys.prefix}/bin/python"
    manifest = build(
        rights.namespace,
        nodes=2,
        processes_per_node=2,
        cpus=0.4,
        memory_gb=1.6,
        shm_gb=0.1,
        grace_seconds=2,
        command=[python, "-m", "torch.distributed.run", "--no-python", python, "-c", script],
        volumes=[{"name": f"host-{n}", "hostPath": {"path": path}} for n, path in enumerate(folders)],
        mounts=[{"name": f"host-{n}", "mountPath": path, "readOnly": True} for n, path in enumerate(folders)],
        env={"OMP_NUM_THREADS": "1"},
    )
    late = {"name": "late", "image": "test.local/shell:1", "command": ["sleep", "6"]}
    replicas(manifest)["Master"]["template"]["spec"]["initContainers"] = [late]
    cluster = KubernetesCluster(rights.client())
    uid = cluster.create(manifest).uid
    name, end, lines = manifest["metadata"]["name"], time.monotonic() + 200, set()
    try:
        while True:
            now = cluster.read(name, rights.namespace)
            seen = observe(now.job, now.pods, now.events)
            for pod in now.pods:
                lines |= set(cluster.tail(pod, 500)) if pod["status"]["phase"] != "Pending" else set()
            if seen.ended and seen.exit_code != 1:
                break
            assert time.monotonic() < end, seen
            time.sleep(1)
        worker = next(pod for pod in now.pods if pod["metadata"]["name"].endswith("worker-0"))
    finally:
        cluster.delete(name, rights.namespace, uid=uid, grace_seconds=0)
    assert "ranks 4" in lines
    assert (seen.phase, seen.reason, seen.exit_code) == (Phase.FAILED, Reason.BAD_DATA, 11)
    assert (seen.failing_rank, seen.replica) == (3, "worker-0")
    waited = [item["name"] for item in worker["spec"]["initContainers"]]
    assert waited == ["await-master", "init-pytorch"]
