"""Jobs in typed words and as text: what comes of them, and what hostile text gets for an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy

import pytest
from kubeflow_training.gangs.reattach import identity
from kubeflow_training.jobs.avoid import away_from
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.kinds import KINDS, kind_of
from kubeflow_training.jobs.kinds.compile import compiled
from kubeflow_training.jobs.manifest import made_name
from kubeflow_training.jobs.manifest.checks.pytorch import check
from kubeflow_training.jobs.manifest.experiments import held, launch_lines
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.manifest.text import manifest_from_text, manifest_to_text
from kubeflow_training.jobs.render import render
from kubeflow_training.jobs.source import job_of, manifest_of
from kubeflow_training.jobs.spec import ElasticPolicy, TrainingJobSpec

OWNER = Owner("My DAG", "manual__2026-01-01T00:00:00+00:00", "train.step")


def build(**more):
    return TrainingJobSpec(**({"name": "train", "image": "x:1", "command": ["torchrun", "t.py"]} | more))


def worker(manifest):
    return manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def contexts(manifest):
    """The security contexts of all pods, and of all their containers."""
    pods = [replica["template"]["spec"] for replica in manifest["spec"]["pytorchReplicaSpecs"].values()]
    containers = [item for pod in pods for item in [*pod["containers"], *pod.get("initContainers", [])]]
    return [pod.get("securityContext") for pod in pods], [item.get("securityContext") for item in containers]


def test_pods_of_a_user_have_no_more_rights_than_the_restricted_standard_gives():
    pods, containers = contexts(build(nodes=2, user=10001).manifest())
    assert [pod["runAsUser"] for pod in pods] == [10001, 10001]
    assert all(pod["runAsNonRoot"] and pod["seccompProfile"] == {"type": "RuntimeDefault"} for pod in pods)
    assert containers == [{"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}] * 3


def test_without_a_user_the_image_decides():
    assert contexts(build(nodes=2).manifest()) == ([None, None], [None, None, None])


def test_every_argument_is_in_the_manifest():
    rich = build(
        nodes=4,
        gpus=8,
        resources={"rdma/hca": 1, "ephemeral-storage": "20Gi"},
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        mounts=[{"name": "data", "mountPath": "/data"}],
        clean_pod_policy="All",
        ttl_seconds=None,
        deadline_seconds=60,
        backoff_limit=2,
        suspend=True,
        scheduling={"minAvailable": 4, "queue": "gang"},
        queue="team",
        queue_priority="high",
        priority_class="urgent",
        spread="one_per_node",
        affinity={"nodeAffinity": {"x": 1}},
        node_selector={"gpu": "h100"},
        tolerations=[{"operator": "Exists"}],
        service_account="trainer",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=["registry"],
        mlflow_run="abc",
        mesh=True,
        pod={"hostNetwork": True, "terminationGracePeriodSeconds": 5, "tolerations": None},
    ).manifest()
    assert check(rich) == []
    assert rich["spec"]["nprocPerNode"] == "8"
    assert rich["spec"]["runPolicy"] == {
        "cleanPodPolicy": "All",
        "activeDeadlineSeconds": 60,
        "backoffLimit": 2,
        "suspend": True,
        "schedulingPolicy": {"minAvailable": 4, "queue": "gang"},
    }
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "high"}
    assert rich["metadata"]["labels"] == labels
    assert rich["metadata"]["annotations"] == {"kubeflow-training/mlflow-run": "abc"}
    pod = worker(rich)
    apart = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart[0]["labelSelector"]["matchLabels"] == {"training.kubeflow.org/job-name": "train"}
    assert pod["affinity"]["nodeAffinity"] == {"x": 1}
    assert "topologySpreadConstraints" not in pod
    assert "tolerations" not in pod
    assert (pod["hostNetwork"], pod["terminationGracePeriodSeconds"]) == (True, 5)
    assert pod["containers"][0]["resources"]["limits"]["rdma/hca"] == "1"
    assert "metadata" not in rich["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] or not rich["spec"][
        "pytorchReplicaSpecs"
    ]["Worker"]["template"]["metadata"].get("annotations")


def test_processes_are_one_per_gpu_unless_given():
    values = [{}, {"gpus": 4}, {"gpus": 4, "processes_per_node": 1}, {"processes_per_node": "auto"}]
    assert [build(**more).manifest()["spec"]["nprocPerNode"] for more in values] == ["1", "4", "1", "auto"]


def test_ranks_wait_for_one_another_longer_than_the_operators_own_init_container():
    pod = worker(build(nodes=2).manifest())
    assert [item["name"] for item in pod["initContainers"]] == ["await-master"]
    assert {"name": "PET_RDZV_CONF", "value": "timeout=1200"} in pod["containers"][0]["env"]
    impatient = worker(build(nodes=2, join_timeout_seconds=0).manifest())
    assert "initContainers" not in impatient
    assert impatient["containers"][0]["env"] == []
    own = worker(build(nodes=2, env={"PET_RDZV_CONF": "timeout=5"}).manifest())
    assert own["containers"][0]["env"] == [{"name": "PET_RDZV_CONF", "value": "timeout=5"}]


def test_an_elastic_job_has_workers_alone():
    manifest = build(nodes=4, elastic=ElasticPolicy(min_nodes=2)).manifest()
    assert check(manifest) == []
    assert list(manifest["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    policy = manifest["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["rdzvBackend"]) == (2, 4, "c10d")
    assert {"key": "join_timeout", "value": "1200"} in policy["rdzvConf"]
    assert manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"


def test_a_spec_is_plain_values_and_back():
    spec = build(nodes=3, elastic=ElasticPolicy(min_nodes=2), env={"A": "1"})
    assert TrainingJobSpec.from_dict(spec.to_dict()) == spec
    text = {**spec.to_dict(), "nodes": "3", "cpus": "1.5", "mesh": "true", "deadline_seconds": ""}
    found = TrainingJobSpec.from_dict(text)
    assert (found.nodes, found.cpus, found.mesh, found.deadline_seconds) == (3, 1.5, True, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node": 2}, "Did you mean `nodes`?"),
        ({"nodes": "many"}, "not a whole number"),
        ({"nodes": True}, "not a whole number"),
        ({"command": "python x.py"}, "not a list"),
        ({"spread": "wide"}, "spread, one_per_node, any"),
        ({"elastic": {"min": 1}}, "min_nodes"),
        ({"image": None}, "it is empty"),
    ],
)
def test_a_wrong_spec_is_named(change, words):
    with pytest.raises(ManifestError) as caught:
        TrainingJobSpec.from_dict({**build().to_dict(), **change})
    assert words in str(caught.value)


def test_a_job_without_a_name_gets_one_of_its_owner():
    first = job_of(None, build(name=""), None, OWNER)
    assert first == job_of(None, build(name="").to_dict(), None, OWNER)
    assert first["metadata"]["name"].startswith("my-dag-train-step-")
    other = job_of(None, build(name=""), None, Owner("My DAG", "another", "train.step"))
    assert other["metadata"]["name"] != first["metadata"]["name"]
    generated = {**build().manifest(), "metadata": {"generateName": "nightly-"}}
    found = job_of(generated, None, None, OWNER)["metadata"]
    assert found["name"].startswith("nightly-")
    assert ("generateName" in found, found["namespace"]) == (False, "default")
    assert check(job_of(None, build(name="", nodes=900), None, Owner("9" * 80, "r", "t"))) == []
    assert made_name("", "x", 54).startswith("job-")


def test_a_spec_compiles_to_the_kind_that_is_asked_for():
    assert job_of(None, build(), "Job", OWNER)["kind"] == "Job"
    with pytest.raises(ManifestError, match="Leave out `kind`"):
        job_of(build().manifest(), None, "Job", OWNER)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("kind: PyTorchjob\napiVersion: kubeflow.org/v1", "PyTorchJob"),
        ("a: 1\n---\nb: 2", "more than one document"),
        ("a: [1, 2", "line 1"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' appears twice, first in line 1"),
        ("a: &x [*x]", "contains itself"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdef", "bcdefg", strict=True)),
            "values",
        ),
        ("!!python/object/apply:os.system ['true']", "line 1"),
        ("a: .nan", "no number of JSON"),
        ("apiVersion: 0x" + "f" * 5000, "a number of 20000 bits"),
        ("a: [{b: -0b1" + "0" * 63 + "1}]", "a number of 65 bits"),
        ("kind: " + "9" * 5000, "digits"),
        ("1: x", "not text"),
        ("[1]", "a list"),
        ("", "empty"),
        ("a: \x00", "special characters"),
        ("a: " + "[" * 5000, "deep"),
        ("x" * (1 << 20) + "xx", "bytes"),
        (7, "instead of a mapping or YAML text"),
        ({"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "spec": {1j: 2}}, "no JSON"),
        ({"kind": "Pod", "apiVersion": "v1"}, "kubeflow.org/v1 PyTorchJob"),
        (None, "needs a manifest or a spec"),
    ],
)
def test_hostile_manifests_are_told_what_is_wrong(manifest, words):
    with pytest.raises(ManifestError) as caught:
        manifest_of(manifest)
    assert words in str(caught.value)


def test_yaml_is_read_as_json_would_be():
    text = "base: &b {x: 1, y: 2}\nmerged: {<<: *b, y: 3}\ndate: 2026-01-01\nagain: *b\n"
    assert manifest_from_text(text) == {
        "base": {"x": 1, "y": 2},
        "merged": {"x": 1, "y": 3},
        "date": "2026-01-01",
        "again": {"x": 1, "y": 2},
    }
    manifest = build(nodes=2).manifest()
    assert manifest_of(manifest_to_text(manifest)) == manifest


def test_a_held_gang_idles_and_says_how_to_start():
    manifest = build(nodes=3, args=["--lr", "1e-3 x"]).manifest()
    idle = held(manifest)
    assert check(idle) == []
    assert "trap" in worker(idle)["containers"][0]["command"][2]
    assert "args" not in worker(idle)["containers"][0]
    assert launch_lines(manifest) == [
        f"kubectl exec -n default train-{pod} -c pytorch -- torchrun t.py --lr '1e-3 x'"
        for pod in ("master-0", "worker-0", "worker-1")
    ] + ["kubectl exec -n default train-master-0 -c pytorch -- touch /tmp/release"]


def test_the_command_line_renders_what_kubectl_takes(tmp_path):
    (tmp_path / "spec.yaml").write_text(manifest_to_text(build(nodes=2).to_dict()))
    command = [sys.executable, "-m", "kubeflow_training.jobs.render"]
    done = subprocess.run([*command, str(tmp_path / "spec.yaml")], capture_output=True, text=True, check=True)
    assert manifest_from_text(done.stdout) == build(nodes=2).manifest()
    assert render(done.stdout) == done.stdout
    (tmp_path / "spec.yaml").write_text("image: x\nnodez: 2\n")
    failed = subprocess.run([*command, str(tmp_path / "spec.yaml")], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "Did you mean `nodes`?" in failed.stderr
    assert "Traceback" not in failed.stderr


def parts(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from parts(item, (*path, key))


@pytest.mark.parametrize("junk", [None, "x", 5, [], [None], {}, {"a": None}, True, "9" * 5000, 1e300], ids=repr)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whatever_stands_anywhere_in_a_manifest_only_a_manifest_error_comes_of_it(kind, junk):
    owner = Owner("dag", "run", "task")
    whole = compiled(build(name="train", nodes=2, join_timeout_seconds=0).manifest(), kind)
    for path in list(parts(whole))[1:]:
        manifest = deepcopy(whole)
        place = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        with suppress(ManifestError):
            found = job_of(manifest, None, None, owner)
            kind_of(found).require_valid(found)
            away_from(identity(found, owner, "1.0").written_on(found, owner), ["node"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_plain_secret_is_refused_in_every_kind(kind):
    manifest = compiled(build(name="train", env={"HARMLESS": "x"}).manifest(), kind)
    text = manifest_to_text(manifest).replace("HARMLESS", "AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ManifestError, match="looks like a secret"):
        kind.require_valid(manifest_from_text(text))


@pytest.mark.parametrize(
    "form", [lambda spec: spec, lambda spec: spec.to_dict(), lambda spec: json.dumps(spec.to_dict())]
)
def test_a_spec_names_the_runtime_of_a_train_job_and_of_nothing_else(form):
    spec = form(build(runtime="ours", runtime_kind="TrainingRuntime"))
    reference = job_of(None, spec, "TrainJob", OWNER)["spec"]["runtimeRef"]
    assert reference == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "ours"}
    for kind in (None, "PyTorchJob", "Job"):
        with pytest.raises(ManifestError, match="only a TrainJob has a runtime, such as 'ours'"):
            job_of(None, spec, kind, OWNER)


def test_a_field_that_is_null_is_not_there_as_in_the_api():
    manifest = build(nodes=1).manifest()
    same = manifest_of({**manifest, "spec": {**manifest["spec"], "elasticPolicy": None}})
    assert same == manifest
    pod = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["args"] = pod["initContainers"] = manifest["spec"]["runPolicy"] = None
    found = manifest_of(manifest)
    assert "runPolicy" not in found["spec"]
    assert launch_lines(held(found))


def test_merges_of_merges_are_refused_before_they_fill_the_memory():
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 20)]
    with pytest.raises(ManifestError, match="merge keys bring more than"):
        manifest_from_text("\n".join(lines))
    with pytest.raises(ManifestError, match="nested too deep"):
        manifest_from_text("a: &a {<<: *a}")
