"""What a cluster lacks for a recipe, read from nodes and claims as Kubernetes tells them."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow_training.jobs.kubernetes.discovery import Served

from dropforge.cli import kube
from dropforge.cli.cluster_checks import (
    Asked,
    _pod_of,
    ahead_of,
    claim_finding,
    examine_cluster,
    job_of,
    lacks,
    node_findings,
    secret_finding,
)
from dropforge.cli.job_manifests import runtime_of
from dropforge.cli.kube import DeniedError
from dropforge.cli.pod_check import pod_findings, small_pod
from dropforge.errors import DropforgeError
from dropforge.install.steps import STEPS
from dropforge.placement.storages import Kind
from dropforge.recipes import load_recipe, parse_recipe
from dropforge.stack.doctor import Level

POD: dict[str, Any] = {
    "containers": [{"resources": {"requests": {"cpu": "4", "memory": "16000M", "nvidia.com/gpu": "2"}}}],
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}


def node(**changes: Any) -> dict[str, Any]:
    """One with four GPUs, as its kubelet tells of it."""
    labels = {"kubernetes.io/arch": "amd64", "node.kubernetes.io/instance-type": "g4dn.12xlarge"}
    has = {"cpu": "47810m", "memory": "192Gi", "nvidia.com/gpu": "4"} | changes.get("has", {})
    return {
        "metadata": {"name": changes.get("name", "n1"), "labels": labels | changes.get("labels", {})},
        "spec": changes.get("spec", {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"}]}),
        "status": {
            "allocatable": {key: value for key, value in has.items() if value},
            "conditions": [{"type": "Ready", "status": changes.get("ready", "True")}],
        },
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"ready": "Unknown"}, "is not ready"),
        ({"spec": {"unschedulable": True}}, "takes no pods"),
        ({"labels": {"kubernetes.io/arch": "arm64"}}, "has kubernetes.io/arch=arm64, and the pod asks for amd64"),
        ({"spec": {"taints": [{"key": "team", "effect": "NoExecute"}]}}, "has the taint team"),
        ({"spec": {"taints": [{"key": "team", "effect": "PreferNoSchedule"}]}}, ""),
        ({"has": {"cpu": "3900m"}}, "has 3900m cpu, and the pod asks for 4"),
        ({"has": {"memory": "15Gi"}}, ""),  # 16.1 GB
        ({"has": {"memory": "14Gi"}}, "has 14Gi memory"),
        ({"has": {"nvidia.com/gpu": ""}}, "has no nvidia.com/gpu, and the pod asks for 2"),
    ],
)
def test_why_a_node_cannot_take_a_pod(changes: dict[str, Any], words: str) -> None:
    found = lacks(node(**changes), POD, POD["containers"][0]["resources"]["requests"])
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("nodes", "pods", "level"),
    [
        ([node(), node(name="n2")], 2, Level.OK),
        ([node()], 2, Level.WARN),
        ([node(has={"cpu": "1"})], 1, Level.FAIL),
        ([], 1, Level.FAIL),
    ],
)
def test_a_gang_is_held_against_all_nodes(nodes: list[dict[str, Any]], pods: int, level: Level) -> None:
    first, *rest = node_findings(nodes, POD, pods=pods)
    assert (first.level, rest) == (level, [])
    assert bool(first.mend) == (level is not Level.OK)


def test_why_no_node_fits_is_told_by_the_commonest_reasons() -> None:
    nodes = [node(name=f"n{n}", has={"cpu": "1"}) for n in range(3)] + [node(name="m", ready="False")]
    (found,) = node_findings(nodes, POD, pods=1)
    assert "none of 4 has room for a pod; n0 and 2 more: has 1 cpu, and the pod asks for 4; m is not" in found.found


def kinds(
    compute: str,
    served: list[str],
    runtime: bool | None,
    found: dict[str, Any] | None = None,
    *,
    queued: bool = False,
) -> dict[str, Any]:
    """:param found: the TrainingRuntime that the namespace has.
    :param queued: whether Kueue leaves TrainJobs as they are.
    """
    recipe = parse_recipe(f"base: {{scratch: {{}}}}\ncompute: {{backend: kubernetes, namespace: team-a{compute}}}")
    asked = Asked(recipe, job_of(recipe))
    cluster: Any = SimpleNamespace(
        get=lambda path: found if path.endswith("/team-a/trainingruntimes/dropforge") else None,
        knows=lambda *_: True,
        trains_with=lambda _: Served(tuple(served), runtime, queued),
        may=lambda *_: True,
        try_out=lambda *where: tried.append(where[0]),
        now=lambda: None,
    )
    tried: list[str] = []
    return {one.check: one for one in examine_cluster(cluster, asked)} | {"tried": tried}


def test_the_kind_of_job_is_looked_at_first() -> None:
    found = kinds("", ["TrainJob", "Job"], True)
    assert found["kind of job"].found == "TrainJob"
    assert found["tried"][0].endswith("trainer.kubeflow.org/v1alpha1/namespaces/team-a/trainjobs")
    assert kinds("", ["Job"], False)["tried"][0] == "/apis/batch/v1/namespaces/team-a/jobs"
    lost = kinds("", ["TrainJob", "Job"], False)
    assert lost["kind of job"].mend == "dropforge manifests runtime --namespace team-a | kubectl apply -f -"
    assert kinds(", kind: TrainJob", ["TrainJob", "Job"], False)["runtime"].level is Level.FAIL
    every = ["TrainJob", "PyTorchJob", "Job"]
    queue = kinds(", queue: team", every, True)["kind of job"]
    assert queue.found.startswith("PyTorchJob: there is no Kueue 0.17 or newer")
    grace = kinds(", queue: team, grace_seconds: 90", every, True, queued=True)["kind of job"]
    assert grace.found == "PyTorchJob: Kueue takes away its `compute.grace_seconds`, which are not 60"
    ranked = kinds(", priority_class: high", every, True)["kind of job"]
    assert ranked.found == "PyTorchJob: a TrainJob cannot name a class of priority, as `compute.priority_class` does"
    broken = kinds(", queue: team, kind: TrainJob", every, True)["kind of job"]
    assert (broken.level, broken.mend) == (Level.FAIL, "Set `compute.kind: auto`")
    unknown = kinds(", kind: TrainJob", ["Job"], False)["kind of job"]
    assert (unknown.level, "Install Kubeflow Trainer 2.2" in unknown.mend) == (Level.FAIL, True)


def test_a_runtime_of_an_earlier_version_is_told() -> None:
    mine = runtime_of("team-a")
    (group,) = mine["spec"]["template"]["spec"]["replicatedJobs"]
    group["replicas"] = 1  # the API server says what it takes for granted
    assert "runtime" not in kinds("", ["TrainJob", "Job"], True, mine)
    del group["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    earlier = kinds("", ["TrainJob", "Job"], True, mine)["runtime"]
    assert (earlier.level, "terminationGracePeriodSeconds is missing" in earlier.found) == (Level.WARN, True)


def test_what_a_queue_adds_to_pods_may_make_them_fit() -> None:
    tainted = node(spec={"taints": [{"key": "team", "effect": "NoSchedule"}]})
    (found,) = node_findings([tainted], POD, pods=1, queued=True)
    assert found.level is Level.WARN
    assert "what the queue's flavors add to the pod is not known here" in found.found


def test_pods_that_keep_apart_do_not_share_a_node() -> None:
    shared, apart = ({**POD, "affinity": affinity} for affinity in ({}, {"podAntiAffinity": {"required": []}}))
    for pod, words in ((shared, "several pods fit on one"), (apart, "unless an autoscaler adds them")):
        (found,) = node_findings([node()], pod, pods=2)
        assert words in found.mend
    assert "each of which gets a node" in found.found


@pytest.mark.parametrize(
    ("more", "large", "level"),
    [(", tokenize_ahead: true", True, Level.OK), (", tokenize_ahead: true", False, Level.FAIL), ("", True, None)],
)
def test_the_pod_that_tokenises_is_held_against_the_nodes_too(more: str, large: bool, level: Level | None) -> None:
    p5 = {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    nodes = [node(name="small", has={"cpu": "7910m", "memory": "30Gi", "nvidia.com/gpu": ""}, spec={})]
    if large:
        nodes.append(node(labels=p5, has={"cpu": "191500m", "memory": "2000Gi", "nvidia.com/gpu": "8"}))
    cluster: Any = SimpleNamespace(
        get=lambda path: {"items": nodes} if path == "/api/v1/nodes" else None,
        knows=lambda *_: True,
        trains_with=lambda _: Served(("PyTorchJob", "Job"), False),
        may=lambda *_: True,
        try_out=lambda *_: None,
        now=lambda: None,
    )
    text = "base: {scratch: {}}\ntrain: {tokens_per_step: 65536}\ncompute: {backend: kubernetes, instance: p5.48xlarge"
    recipe = parse_recipe(f"{text}{more}}}")
    asked = Asked(recipe, job_of(recipe), ahead=ahead_of(recipe))
    found = {one.check: one for one in examine_cluster(cluster, asked) if one.check.startswith("nodes")}
    assert found.pop("nodes").level is (Level.OK if large else Level.FAIL)
    assert [one.level for one in found.values()] == ([] if level is None else [level])
    if level is Level.FAIL:
        assert "small has 7910m cpu, and the pod asks for 23" in found["nodes to tokenise"].found


def test_gpus_and_network_devices_that_no_plugin_shows_are_told() -> None:
    there = node(has={"nvidia.com/gpu": "8"}, labels={"node.kubernetes.io/instance-type": "p5.48xlarge"})
    silent = node(name="n2", has={"nvidia.com/gpu": "0"}, labels={"node.kubernetes.io/instance-type": "p5.48xlarge"})
    fast = {"cpu": "4", "nvidia.com/gpu": "2", "vpc.amazonaws.com/efa": "32"}
    _, gpu, efa = node_findings([there, silent], {**POD, "containers": [{"resources": {"requests": fast}}]}, pods=1)
    assert "1 nodes show no nvidia.com/gpu, n2" in gpu.found
    assert "2 nodes show no vpc.amazonaws.com/efa, n1" in efa.found
    labelled = node(has={"nvidia.com/gpu": ""}, labels={"node.kubernetes.io/instance-type": "own"})
    labelled["metadata"]["labels"]["nvidia.com/gpu.present"] = "true"
    assert [one.check for one in node_findings([labelled], POD, pods=1)] == ["nodes", "nvidia.com/gpu"]
    slow = {**POD, "containers": [{"resources": {"requests": {"cpu": "4"}}}]}
    assert [one.check for one in node_findings([labelled], slow, pods=1)] == ["nodes"]  # nobody asks for them


@pytest.mark.parametrize(
    ("modes", "phase", "nodes", "writes", "level", "words"),
    [
        (["ReadWriteMany"], "Bound", 2, True, Level.OK, "bound"),
        (["ReadWriteOnce"], "Bound", 1, True, Level.OK, "bound"),
        (["ReadWriteOnce"], "Bound", 2, False, Level.FAIL, "2 nodes would read it, and its mode is ReadWriteOnce"),
        (["ReadOnlyMany"], "Bound", 2, False, Level.OK, "bound"),
        (["ReadOnlyMany"], "Bound", 2, True, Level.FAIL, "2 nodes would write to it"),
        (["ReadOnlyMany"], "Bound", 1, True, Level.FAIL, "its mode is ReadOnlyMany"),
        (["ReadWriteMany"], "Pending", 2, True, Level.WARN, "it is Pending"),
    ],
)
def test_a_claim_has_to_suit_the_number_of_nodes(
    modes: list[str], phase: str, nodes: int, writes: bool, level: Level, words: str
) -> None:
    found = claim_finding("c", {"spec": {"accessModes": modes}, "status": {"phase": phase}}, nodes=nodes, writes=writes)
    assert found.level is level
    assert words in found.found
    assert claim_finding("c", None, nodes=nodes, writes=writes).level is Level.FAIL


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("lustre", {"accessModes": ["ReadWriteMany"], "storageClassName": "dropforge-fsx"}, "bound"),
        ("nfs", {"accessModes": ["ReadWriteMany"], "storageClassName": "of-their-own"}, "bound"),
        ("node", {"accessModes": ["ReadWriteMany"], "storageClassName": ""}, "bound"),
        ("nfs", {"accessModes": ["ReadWriteMany"], "storageClassName": "dropforge-fsx"}, "makes `lustre`"),
        ("node", {"accessModes": ["ReadWriteOnce"], "storageClassName": "gp3"}, "that of a disk of one node"),
    ],
)
def test_a_claim_is_what_the_recipe_says_that_it_stands_on(kind: Kind, spec: dict[str, Any], words: str) -> None:
    found = claim_finding("c", {"spec": spec, "status": {"phase": "Bound"}}, nodes=1, writes=True, kind=kind)
    assert words in found.found
    assert found.level is (Level.OK if words == "bound" else Level.WARN)


def test_the_mend_of_a_secret_is_one_that_an_installation_without_a_stack_can_give() -> None:
    missing, empty = secret_finding("team-a", None), secret_finding("team-a", {"data": {"HF_TOKEN": "eA=="}})
    assert (missing.level, empty.level) == (Level.FAIL, Level.WARN)
    plan = next(step for step in STEPS if step.name == "trainer-secret").before[0]
    assert missing.mend.startswith(plan.replace("$TRAINING", "team-a").split("=")[0])
    assert empty.mend.startswith("kubectl patch secret dropforge-trainer --namespace team-a ")
    for finding in (missing, empty):
        assert "; with a stack of `dropforge up`: dropforge secret --namespace team-a |" in finding.mend
    kept = secret_finding("team-a", {"data": {"MLFLOW_TRACKING_URI": "eA==", "AWS_ACCESS_KEY_ID": "eA=="}})
    assert kept.found == "dropforge-trainer names AWS_ACCESS_KEY_ID, MLFLOW_TRACKING_URI"


def test_a_recipe_that_trains_on_this_machine_asks_nothing_of_a_cluster() -> None:
    with pytest.raises(DropforgeError, match="it trains on this machine"):
        job_of(load_recipe("tiny"))
    job = job_of(parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes, namespace: team-a}"))
    assert job["metadata"]["namespace"] == "team-a"


class Answers:
    """An API server that answers everything with one status and message."""

    def __init__(self, status: int, message: str) -> None:
        from kubernetes.client.exceptions import ApiException

        self.error = ApiException(status=status)
        self.error.body = json.dumps({"message": message})

    def call_api(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (
            403,
            'pods is forbidden: User "ann" cannot create resource "pods" in API group "" in the namespace "a"',
            DeniedError,
        ),
        (
            403,
            'pods "x" is forbidden: error looking up service account a/b: serviceaccount "b" not found',
            DropforgeError,
        ),
        (403, 'pods "x" is forbidden: maximum cpu usage per Container is 1, but limit is 4', DropforgeError),
        (403, 'pods "x" is forbidden: no PriorityClass with name urgent was found', DropforgeError),
        (503, "the server is currently unable to handle the request", DropforgeError),
    ],
)
def test_who_refuses_is_told_from_a_right_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, status: int, message: str, kind: type[DropforgeError]
) -> None:
    monkeypatch.setattr(kube, "api_client", lambda: Answers(status, message))
    with pytest.raises(DropforgeError, match=re.escape(message[:30])) as raised:
        kube.Cluster().try_out("/api/v1/namespaces/a/pods", {})
    assert type(raised.value) is kind
    assert "tried again" not in raised.value.mend


def test_what_is_answered_is_told_and_a_proxys_page_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([b'{"gitVersion": "v1.36.3"}', b"<html>Log in</html>"])
    server = SimpleNamespace(call_api=lambda *_, **__: SimpleNamespace(data=next(answers)))
    monkeypatch.setattr(kube, "api_client", lambda: server)
    assert kube.Cluster().get("/version") == {"gitVersion": "v1.36.3"}
    with pytest.raises(DropforgeError, match="the answer is no JSON"):
        kube.Cluster().get("/version")


def test_a_claim_whose_class_is_not_there_never_gets_a_volume() -> None:
    def found(spec: dict[str, Any], classes: list[str] | None) -> tuple[Level, str]:
        claim = {"spec": {"accessModes": ["ReadWriteMany"], **spec}, "status": {"phase": "Pending"}}
        one = claim_finding("c", claim, nodes=1, writes=True, classes=classes)
        return one.level, one.found

    assert found({"storageClassName": "fsx"}, ["gp3"]) == (Level.FAIL, "its StorageClass fsx is not there")
    level, text = found({}, ["gp3"])
    assert (level, "no default" in text) == (Level.FAIL, True)
    for spec, classes in (({"storageClassName": "fsx"}, ["fsx"]), ({"storageClassName": ""}, []), ({}, None)):
        assert found(spec, classes)[0] is Level.WARN
    assert found({"volumeName": "v", "storageClassName": "none"}, [])[0] is Level.WARN


@pytest.mark.parametrize(("behind", "level"), [(0.0, Level.OK), (-2000.0, Level.WARN), (2000.0, Level.WARN)])
def test_clocks_that_are_apart_are_told(behind: float, level: Level) -> None:
    cluster: Any = SimpleNamespace(
        get=lambda _: None, knows=lambda *_: True,
        trains_with=lambda _: Served(("PyTorchJob", "Job"), False), may=lambda *_: True, try_out=lambda *_: None,
        now=lambda: time.time() + behind,
    )  # fmt: skip
    recipe = parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes}")
    (found,) = [one for one in examine_cluster(cluster, Asked(recipe, job_of(recipe))) if one.check == "clock"]
    assert found.level is level
    assert ("behind" in found.found) == (behind > 0)


BACK_OFF = {"reason": "ImagePullBackOff", "message": "401"}
ENDED = {"status": {"phase": "Succeeded"}}
TOLD = {"libraries": {"torch": "2.11.0", "cuda": None}, "problems": []}


@pytest.mark.parametrize(
    ("pod", "log", "levels", "words"),
    [
        (ENDED, json.dumps(TOLD), [Level.OK, Level.OK], "torch 2.11.0"),
        (
            {"status": {"phase": "Failed"}},
            json.dumps({**TOLD, "problems": [{"thing": "S3", "cause": "AccessDenied", "mend": "Look"}]}),
            [Level.OK, Level.FAIL],
            "AccessDenied",
        ),
        ({"status": {"phase": "Failed"}}, "No module named trainer", [Level.FAIL], "No module named trainer"),
        (ENDED, '{"problems": 3}', [Level.FAIL], "did not answer"),
        (ENDED, "[" * 5000, [Level.FAIL], "did not answer"),
        (None, "", [Level.FAIL], "deleted"),
        (
            {"status": {"containerStatuses": [{"state": {"waiting": BACK_OFF}}]}},
            "",
            [Level.FAIL],
            "ImagePullBackOff: 401",
        ),
        (
            {"status": {"phase": "Pending", "conditions": [{"status": "False", "message": "0/3 nodes"}]}},
            "",
            [Level.FAIL],
            "0/3 nodes",
        ),
    ],
)  # fmt: skip
def test_what_a_pod_says_of_itself(pod: dict[str, Any] | None, log: str, levels: list[Level], words: str) -> None:
    found = list(pod_findings(pod, log))
    assert [one.level for one in found] == levels
    assert words in " ".join(one.found for one in found)
    assert all(bool(one.mend) == (one.level is not Level.OK) for one in found)


def test_the_pod_that_looks_asks_for_little_and_for_what_the_jobs_pods_need() -> None:
    text = "base: {scratch: {}}\ncompute: {backend: kubernetes, instance: p5.48xlarge, image_pull_secrets: [login]}"
    recipe = parse_recipe(f"{text}\ntrain: {{tokens_per_step: 65536}}")
    spec = small_pod(_pod_of(job_of(recipe)), "doctor", "b")["spec"]
    (container,) = spec["containers"]
    assert container["command"][-2:] == ["--bucket", "b"]
    assert not [name for name in container["resources"]["limits"] if "/" in name]
    assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == "p5.48xlarge"
    assert (spec["imagePullSecrets"], spec["restartPolicy"]) == ([{"name": "login"}], "Never")
    assert container["envFrom"] == [{"secretRef": {"name": "dropforge-trainer"}}]
