"""The manifest as it is sent, and what the checks say about wrong ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from kubeflow_training.jobs import spec as spec_module
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.local.capacity import Resources, gang_resources, machine
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.manifest.checks.pod import quantity
from kubeflow_training.jobs.manifest.checks.pytorch import check, require_valid


def build(**more):
    values = {"name": "train-1", "image": "x:1", "command": ["python", "-m", "trainer.launch", "s3://b/run.json"]}
    return pytorch_job(**(values | more))


def test_the_whole_manifest_of_two_nodes():
    manifest = build(
        namespace="ml",
        nodes=3,
        processes_per_node=2,
        cpus=1.5,
        memory_gb=4,
        gpus=2,
        env={"B": "2", "A": "1"},
        secrets=["s3"],
        grace_seconds=90,
        deadline_seconds=3600,
        labels={"team": "x"},
        annotations={"note": "y"},
    )
    resources = {"cpu": "1500m", "memory": "4000M", "nvidia.com/gpu": "2"}
    mesh = {"sidecar.istio.io/inject": "false"}
    await_master = {
        "name": "await-master",
        "image": "x:1",
        "command": ["sh", "-c", spec_module._AWAIT.format(seconds=1200)],
        "env": [
            {
                "name": "JOB_NAME",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['training.kubeflow.org/job-name']"}},
            },
            {"name": "MASTER", "value": "$(JOB_NAME)-master-0"},
        ],
        "resources": {part: {"cpu": "50m", "memory": "32M"} for part in ("requests", "limits")},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    template = {
        "metadata": {"labels": mesh, "annotations": {**mesh, "linkerd.io/inject": "disabled"}},
        "spec": {
            "containers": [
                {
                    "name": "pytorch",
                    "image": "x:1",
                    "command": ["python", "-m", "trainer.launch", "s3://b/run.json"],
                    "env": [
                        {"name": "A", "value": "1"},
                        {"name": "B", "value": "2"},
                        {"name": "PET_RDZV_CONF", "value": "timeout=1200"},
                    ],
                    "envFrom": [{"secretRef": {"name": "s3"}}],
                    "resources": {"requests": resources, "limits": resources},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "terminationGracePeriodSeconds": 90,
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2000M"}}],
            "topologySpreadConstraints": [
                {
                    "labelSelector": {"matchLabels": {"training.kubeflow.org/job-name": "train-1"}},
                    "topologyKey": "kubernetes.io/hostname",
                    "maxSkew": 1,
                    "whenUnsatisfiable": "ScheduleAnyway",
                }
            ],
        },
    }
    waiting = {**template, "spec": {**template["spec"], "initContainers": [await_master]}}
    assert manifest == {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train-1", "namespace": "ml", "labels": {"team": "x"}, "annotations": {"note": "y"}},
        "spec": {
            "nprocPerNode": "2",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "activeDeadlineSeconds": 3600,
                "ttlSecondsAfterFinished": 604800,
            },
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "Never", "template": template},
                "Worker": {"replicas": 2, "restartPolicy": "Never", "template": waiting},
            },
        },
    }
    assert check(manifest) == []
    assert gang_resources(manifest) == Resources(4.5, 12e9, 6)


def test_one_node_has_no_worker_key():
    assert list(build()["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_a_queue_starts_suspended():
    manifest = build(queue="team")
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert manifest["spec"]["runPolicy"]["suspend"] is True


def test_the_fingerprint_is_of_name_and_spec_alone():
    same = fingerprint(build(labels={"a": "b"}, annotations={"c": "d"}))
    assert same == fingerprint(build())
    assert len({same, fingerprint(build(name="x")), fingerprint(build(cpus=3)), fingerprint(build(namespace="y"))}) == 4


def master(manifest):
    return manifest["spec"]["pytorchReplicaSpecs"]["Master"]


def container(manifest):
    return master(manifest)["template"]["spec"]["containers"][0]


def containers(manifest):
    return master(manifest)["template"]["spec"]["containers"]


WRONG = {
    "starts with a digit": (lambda m: m["metadata"].update(name="1a"), "DNS-1035"),
    "upper case": (lambda m: m["metadata"].update(name="Train"), "DNS-1035"),
    "path": (lambda m: m["metadata"].update(name="../x"), "DNS-1035"),
    "too long": (lambda m: m["metadata"].update(name="a" * 60), "Shorten it"),
    "namespace": (lambda m: m["metadata"].update(namespace="A/b"), "namespace"),
    "kind": (lambda m: m.update(kind="Job"), "pytorch_job"),
    "container": (lambda m: container(m).update(name="main"), "Name it `pytorch`"),
    "image": (lambda m: container(m).update(image=""), "Name an image"),
    "two masters": (lambda m: master(m).update(replicas=2), "exactly one master"),
    "no master": (lambda m: m["spec"]["pytorchReplicaSpecs"].pop("Master"), "exactly one master"),
    "no workers": (
        lambda m: m["spec"]["pytorchReplicaSpecs"].update(Worker={**master(m), "replicas": 0}),
        "Leave the Worker key out",
    ),
    "nproc": (lambda m: m["spec"].update(nprocPerNode=2), 'Write it as "2"'),
    "quantity": (lambda m: container(m)["resources"]["requests"].update(cpu="many"), "Write 2 or 4Gi"),
    "grace": (lambda m: master(m)["template"]["spec"].update(terminationGracePeriodSeconds="1m"), "whole number"),
    "secret by name": (lambda m: container(m)["env"].append({"name": "HF_TOKEN", "value": "x"}), "Kubernetes secret"),
    "aws key": (
        lambda m: container(m)["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}),
        "Kubernetes secret",
    ),
    "secret by value": (
        lambda m: container(m)["env"].append({"name": "URI", "value": "http://u:p@host"}),
        "Kubernetes secret",
    ),
    "replicas left out": (lambda m: master(m).pop("replicas"), "exactly one master"),
    "replicas as text": (lambda m: master(m).update(replicas="1"), "whole number"),
    "empty replica": (lambda m: m["spec"]["pytorchReplicaSpecs"].update(Worker=None), "leave the key out"),
    "third replica": (lambda m: m["spec"]["pytorchReplicaSpecs"].update(Boss=master(m)), "Only Master and Worker"),
    "no replicas": (lambda m: m["spec"].update(pytorchReplicaSpecs=None), "exactly one master"),
    "side-car without image": (lambda m: containers(m).append({"name": "side"}), "Name an image"),
    "two of a name": (
        lambda m: (
            containers(m).append({"name": "side", "image": "x"}) or containers(m).append({"name": "side", "image": "x"})
        ),
        "its own name",
    ),
    "two numbers of processes": (lambda m: m["spec"].update(elasticPolicy={"nProcPerNode": 2}), "deprecated"),
    "processes as a word": (lambda m: m["spec"].update(nprocPerNode="many"), "auto, cpu, gpu"),
    "manager": (lambda m: m["spec"]["runPolicy"].update(managedBy="me"), "kubeflow.org/training-operator"),
    "clean-up": (lambda m: m["spec"]["runPolicy"].update(cleanPodPolicy="Never"), "Running, All, None"),
    "time to live": (lambda m: m["spec"]["runPolicy"].update(ttlSecondsAfterFinished="1d"), "whole number"),
    "restart policy": (lambda m: master(m).update(restartPolicy="never"), "OnFailure"),
    "pull policy": (lambda m: container(m).update(imagePullPolicy="never"), "IfNotPresent"),
    "shared memory": (
        lambda m: master(m)["template"]["spec"]["volumes"][0]["emptyDir"].update(sizeLimit="3G"),
        "one contains the other",
    ),
    "volume": (lambda m: container(m)["volumeMounts"].append({"name": "data", "mountPath": "/d"}), "Add it to"),
    "mounts": (lambda m: container(m)["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"}), "Mount one"),
    "variable": (lambda m: container(m)["env"].append({"name": "A B", "value": "1"}), "letters, digits"),
    "number as value": (lambda m: container(m)["env"].append({"name": "A", "value": 1}), 'Write it as "1"'),
    "shell line": (lambda m: container(m).update(command="python x.py"), "Write a list"),
    "more than the limit": (lambda m: container(m)["resources"]["requests"].update(cpu="9"), "no more than the limit"),
    "half a gpu": (lambda m: container(m)["resources"]["requests"].update({"nvidia.com/gpu": "1"}), "the same number"),
    "secret argument": (lambda m: container(m)["command"].append("AKIAABCDEFGHIJKLMNOP"), "Kubernetes secret"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_manifests_come_with_the_mend(name):
    spoil, words = WRONG[name]
    manifest = copy.deepcopy(build())
    spoil(manifest)
    with pytest.raises(ManifestError) as caught:
        require_valid(manifest)
    assert words in str(caught.value)


def test_what_only_sounds_like_a_secret_may_pass():
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "12",
        "MLFLOW_TRACKING_URI": "http://host:5000",
        "EMPTY_TOKEN": "",
    }
    assert check(build(env=env)) == []


def test_room_for_many_workers():
    assert check(build(name="a" * 53, nodes=2)) == []
    assert check(build(name="a" * 53, nodes=200)) != []


def test_quantities():
    assert [quantity(v) for v in ("500m", "2", 3, "1.5Gi", "4000M")] == [0.5, 2, 3, 1.5 * 2**30, 4e9]
    for wrong in ("", "x", "1 cpu", None):
        with pytest.raises(ValueError, match="quantity"):
            quantity(wrong)


def test_what_is_missing_is_said_in_words():
    want = Resources(4, 8e9, 1)
    assert want.missing(Resources(2, 6.5e9, 0)) == "2 cpus, 1.5 GB of memory and 1 gpu"
    assert want.missing(Resources(3, 8e9, 1)) == "1 cpu"
    assert want.missing(want) == ""


@pytest.mark.parametrize(("text", "limited"), [("1048576000\n", True), ("max\n", False), (None, False)])
def test_a_container_offers_no_more_memory_than_it_may_take(tmp_path: Path, text: str | None, limited: bool) -> None:
    limit = tmp_path / "memory.max"
    if text is not None:
        limit.write_text(text)
    assert (machine({}, (limit,)).memory == 1048576000) is limited
    assert machine({"KUBEFLOW_TRAINING_MEMORY_GB": "3"}, (limit,)).memory == 3e9
