"""Kinds of jobs: which manifest is which, one description for all of them, and clear errors for what cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kubeflow_training.jobs.errors import JobRefusedError, ManifestError
from kubeflow_training.jobs.kinds import INDEXED_JOB, KINDS, TRAIN_JOB, kind_named, kind_of, kind_seen
from kubeflow_training.jobs.kinds.compile import compiled, indexed_job, train_job, training_runtime
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.local.capacity import Resources, job_resources
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.naming import renamed
from kubeflow_training.jobs.observation import kueue

from tests.kubeflow_training.rights import Rights, admin

SPEC: dict[str, Any] = {
    "name": "zeta",
    "namespace": "ml",
    "image": "registry/trainer:1",
    "command": ["python", "-m", "trainer"],
    "nodes": 3,
    "processes_per_node": 2,
    "gpus": 2,
    "env": {"A": "1"},
    "queue": "gpus",
    "deadline_seconds": 60,
    "grace_seconds": 9,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_plain_secret_in_an_init_container_is_refused_with_its_place(kind):
    manifest = compiled(pytorch_job(**SPEC), kind)
    init = {"name": "fetch", "image": "tools:1", "env": [{"name": "HF_TOKEN", "value": "x"}]}
    kind.pod_specs(manifest)[-1]["initContainers"] = [init]
    with pytest.raises(ManifestError, match=r"containers\.fetch\.env\.HF_TOKEN`: its value looks like a secret"):
        kind.require_valid(manifest)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_one_description_for_every_kind(kind):
    manifest = compiled(pytorch_job(**SPEC), kind)
    assert kind_of(manifest) is kind is kind_named(kind.name) is kind_seen(manifest)
    kind.require_valid(manifest)
    assert kind.wanted(manifest) == 3
    assert kind.suspended(manifest)
    assert kueue.queue_of(manifest) == "gpus"
    for pod in kind.pod_specs(manifest):
        assert pod["terminationGracePeriodSeconds"] == 9
        assert any(volume["emptyDir"].get("medium") == "Memory" for volume in pod["volumes"])
    # Nothing of the name is left when a gang gets another one.
    assert "zeta" not in str(renamed(manifest, "other"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_a_job_asks_for_is_read_from_every_kind(kind):
    manifest = compiled(pytorch_job(**SPEC, cpus=0.5, memory_gb=2), kind)
    assert kind.processes(manifest) == 2
    assert job_resources(manifest) == Resources(1.5, 6e9, 6)
    assert kind.processes({"spec": None}) == 1
    odd = {"kind": kind.name, "spec": {"trainer": 3, "template": [], "pytorchReplicaSpecs": 1}}
    assert job_resources(odd) == Resources()


def test_an_indexed_job_has_the_training_operators_environment():
    manifest = indexed_job(**SPEC)
    pod = manifest["spec"]["template"]["spec"]
    env = {item["name"]: item.get("value", "from a label") for item in pod["containers"][0]["env"]}
    assert {"A": "1", "WORLD_SIZE": "6", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "2"}.items() <= env.items()
    assert {env["RANK"], env["PET_NODE_RANK"]} == {"from a label"}
    assert (env["MASTER_ADDR"], env["PET_MASTER_ADDR"]) == ("$(JOB_NAME)-0.$(JOB_NAME)", "$(MASTER_ADDR)")
    assert (manifest["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert not INDEXED_JOB.restarts(manifest)
    service = INDEXED_JOB.service({**manifest, "metadata": {**manifest["metadata"], "uid": "u"}})
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["ownerReferences"][0]["uid"] == "u"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"secrets": ["s"]}, "containers.envFrom"),
        ({"priority_class": "high"}, "priorityClassName"),
        ({"pod": {"hostNetwork": True}}, "hostNetwork"),
        ({"scheduling": {"minAvailable": 2}}, "schedulingPolicy"),
    ],
)
def test_what_a_train_job_cannot_say_is_refused(more, words):
    with pytest.raises(ManifestError, match=words):
        train_job(**SPEC, **more)


def test_a_train_job_may_have_what_its_runtime_says():
    pod = {"priorityClassName": "high", "automountServiceAccountToken": False}
    runtime = training_runtime("whole-gangs", "ml", secrets=["keys"], pod=pod)
    said = {"secrets": ["keys"], "priority_class": "high", "pod": {"automountServiceAccountToken": False}}
    manifest = compiled(pytorch_job(**SPEC, **said), TRAIN_JOB, runtime=runtime)
    TRAIN_JOB.require_valid(manifest)
    assert (manifest["spec"]["runtimeRef"]["kind"], manifest["spec"]["runtimeRef"]["name"]) == (
        "TrainingRuntime",
        "whole-gangs",
    )
    for other, words in (({"secrets": ["others"]}, "containers.envFrom"), ({"priority_class": "low"}, "priorityClass")):
        with pytest.raises(ManifestError, match=words):
            compiled(pytorch_job(**SPEC, **said | other), TRAIN_JOB, runtime=runtime)


def test_a_train_job_mounts_a_volume_as_often_as_it_is_told():
    mounts = [
        {"name": "data", "mountPath": "/a", "subPath": "a"},
        {"name": "data", "mountPath": "/b", "subPath": "b"},
        {"name": "more", "mountPath": "/c"},
        {"name": "data", "mountPath": "/d", "subPath": "d"},
    ]
    volumes = [{"name": name, "emptyDir": {}} for name in ("data", "more")]
    patches = train_job(**SPEC, volumes=volumes, mounts=mounts)["spec"]["runtimePatches"]
    found = []
    for patch in patches:
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        names = [mount["name"] for mount in container["volumeMounts"]]
        assert len(set(names)) == len(names)
        found += [mount for mount in container["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
    assert sorted(found, key=lambda mount: mount["mountPath"]) == mounts
    assert len({patch["manager"] for patch in patches}) == 3


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_only_a_job_of_two_groups_of_pods_joins_them_in_one_place(kind):
    place = {"kueue.x-k8s.io/podset-required-topology": "rack", "kueue.x-k8s.io/podset-group-name": "gang"}
    text = str(compiled(pytorch_job(**SPEC, pod_annotations=place), kind))
    assert "podset-required-topology" in text
    assert ("podset-group-name" in text) == (kind.name == "PyTorchJob")


def test_kinds_that_are_none():
    for manifest, nearest in (
        ({"kind": "PytorchJob", "apiVersion": "kubeflow.org/v1"}, "PyTorchJob"),
        ({"kind": "TrainJob", "apiVersion": "trainer.kubeflow.org/v2"}, "TrainJob"),
        ({"kind": "JobSet", "apiVersion": "jobset.x-k8s.io/v1alpha2"}, "Job"),
        (None, "PyTorchJob"),
    ):
        with pytest.raises(ManifestError, match=f"kind: {nearest}`"):
            kind_of(manifest)
    with pytest.raises(ManifestError, match="Did you mean TrainJob"):
        kind_named("trainjob")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_names_leave_room_for_the_pods(kind):
    last = {"PyTorchJob": "-worker-1", "TrainJob": "-node-0-2-abcde", "Job": "-2"}[kind.name]
    longest = 63 - len(last)
    manifest = compiled(pytorch_job(**SPEC), kind)
    for length in (longest, longest + 1):
        manifest["metadata"]["name"] = "a" * length
        if length == longest:
            kind.require_valid(manifest)
        else:
            with pytest.raises(ManifestError, match="Shorten it"):
                kind.require_valid(manifest)


def test_a_backend_is_of_one_kind():
    from kubernetes import client

    backend = KubernetesCluster(client.ApiClient(client.Configuration(host="http://127.0.0.1:9")), TRAIN_JOB)
    with pytest.raises(ManifestError, match='kind="PyTorchJob"'):
        backend.create(pytorch_job(**SPEC))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_namespace_or_a_kind_that_is_not_there(kind, rights: Rights):
    manifest = compiled(pytorch_job(**SPEC), kind)
    manifest["metadata"]["namespace"] = "no-such-namespace"
    with pytest.raises(JobRefusedError, match="there is no namespace no-such-namespace"):
        KubernetesCluster(admin(), kind).create(manifest)
    absent = dataclasses.replace(kind, group="not.installed.example", controller="what serves it")
    with pytest.raises(JobRefusedError, match=f"knows no {kind.name} .*Install what serves it"):
        KubernetesCluster(admin(), absent).read("job", rights.namespace)


@pytest.mark.cluster
def test_the_service_of_an_indexed_job_comes_and_goes_with_it(rights: Rights):
    import time

    from kubernetes import client, config

    core = client.CoreV1Api(admin())
    backend = KubernetesCluster(config.new_client_from_config(str(rights.kubeconfig)), INDEXED_JOB)
    manifest = indexed_job(**SPEC | {"name": "named", "namespace": rights.namespace})

    def services() -> list[Any]:
        return [item for item in core.list_namespaced_service(rights.namespace).items if item.metadata.name == "named"]

    # What an interrupted create left is taken over.
    core.create_namespaced_service(rights.namespace, INDEXED_JOB.service(manifest))
    snapshot = backend.create(manifest)
    assert [owner.uid for owner in services()[0].metadata.owner_references] == [snapshot.uid]
    assert backend.delete("named", rights.namespace, uid=snapshot.uid, grace_seconds=0)
    end = time.monotonic() + 30
    while services():
        assert time.monotonic() < end
        time.sleep(0.1)
    # Somebody else's Service of that name is left alone.
    core.create_namespaced_service(
        rights.namespace, {"metadata": {"name": "named"}, "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}}}
    )
    with pytest.raises(JobRefusedError, match="a Service of that name exists"):
        backend.create(manifest)
    assert not backend.delete("named", rights.namespace)
    assert services()
    core.delete_namespaced_service("named", rights.namespace)
