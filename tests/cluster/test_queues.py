"""The queues of a file of teams, on a real API server with Kueue: what is accepted, who gets what, who comes first."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kinds import INDEXED_JOB, PYTORCH_JOB
from kubeflow_training.jobs.observation import observe
from kubernetes import client
from kubernetes.client import ApiException
from typer.testing import CliRunner

from dropforge.cli.queues import app
from dropforge.placement.queues import PRIORITY, path_of, render
from dropforge.placement.teams_file import parse_teams
from tests.cluster.queue_yard import Looks, apply, call, queues
from tests.e2e.harness import wait
from tests.kubeflow_training.rights import admin
from tests.kubeflow_training.situations import PRETEND, SLEEP, Job, Stage

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path(os.environ.get("KUBECONFIG", "/none")).is_file(), reason="KUBECONFIG names no cluster"),
]

EXAMPLE = Path(__file__).parents[2] / "helm-values/teams.yaml"
PODS, GPUS = 3, 8
"""Of a gang, and of each of its pods: a whole node."""
ROOM = {"gpus": 64, "cpus": 1000, "memory_gb": 1000}
"""Of each team: two gangs and two thirds of one more."""

TAKEN_BACK = ("InCohortReclamation", "InCohortFairSharing")
"""As what is lent comes back: without fair sharing, and with it."""


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    core, names = client.CoreV1Api(admin()), [f"team-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    for name in names:
        core.create_namespace({"metadata": {"name": name}})
    yield names
    for name in names:
        core.delete_namespace(name, grace_period_seconds=0)


def test_every_object_of_the_example_is_accepted_by_the_api_server(namespaces: list[str]) -> None:
    file = yaml.safe_load(EXAMPLE.read_text())
    for name, team in file["teams"].items():
        team |= {"namespace": namespaces[0], "queue": f"{name}-queue"}
    file["cohorts"] |= {"whole": {}, "training": {**file["cohorts"]["training"], "parent": "whole"}}
    file["cohorts"]["training"] |= {"weight": 0.5}
    file["teams"]["vision"] |= {"order": "strict", "preempts": {"borrow": "lower"}}
    alone = {"priorities": [], "quota": {"cpu": {"cpus": 0.5, "memory_gb": 1.5}}}
    file["teams"]["alone"] = {"namespace": namespaces[1], **alone}
    objects = render(parse_teams(json.dumps(file)))
    assert {one["kind"] for one in objects} >= {"Cohort", "ClusterQueue", "ValidatingAdmissionPolicyBinding"}
    for one in objects:
        found = apply(one, dryRun="All", fieldValidation="Strict")
        assert found["metadata"]["name"] == one["metadata"]["name"]


def two_teams(namespaces: list[str], flavor: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Teams `left` and `right` of one cohort, each in a namespace of its own, and priorities `low` and `urgent`."""
    mark = namespaces[0].removeprefix("team-")
    team = {"queue": "training", "cohort": f"both-{mark}", "quota": {f"nodes-{mark}": dict(ROOM)}, **more}
    return {
        "flavors": {f"nodes-{mark}": flavor},
        "priorities": {f"low-{mark}": -100, f"urgent-{mark}": 100},
        "cohorts": {f"both-{mark}": {}},
        "teams": {name: {**team, "namespace": name} for name in namespaces},
    }


ON_PRETEND = {
    "labels": PRETEND["node_selector"],
    "tolerations": [{"key": one["key"]} for one in PRETEND["tolerations"]],
}


class Side:
    """One team at work on pretend nodes."""

    def __init__(self, namespace: str, mark: str) -> None:
        self.stage, self.looks, self.mark = Stage(admin(), namespace), Looks(namespace), mark

    def gangs(self, number: int, priority: str | None = None, **more: Any) -> set[str]:
        """Start so many gangs; their names."""
        wishes = {"nodes": PODS, "gpus": GPUS, "queue": "training", "queue_priority": priority and self.named(priority)}
        return {self.stage.submit(SLEEP, **{**wishes, **more}).name for _ in range(number)}

    def named(self, priority: str) -> str:
        return f"{priority}-{self.mark}"

    def whole(self) -> bool:
        """Whether each gang that is admitted has all its pods, and no other has one."""
        return self.looks.pods() == dict.fromkeys(self.looks.admitted(), PODS)


@pytest.fixture
def sides(namespaces: list[str]) -> Iterator[tuple[Side, Side]]:
    mark = namespaces[0].removeprefix("team-")
    with queues(two_teams(namespaces, ON_PRETEND)):
        left, right = (Side(name, mark) for name in namespaces)
        yield left, right  # their jobs go with the namespaces


def settled(what: str, left: Side, right: Side, *, gangs: tuple[int, int]) -> None:
    """So many gangs of each team are admitted, and all their pods are there."""

    def reached() -> bool:
        counts = tuple(len(side.looks.admitted()) for side in (left, right))
        return counts == gangs and left.whole() and right.whole()

    wait(what, reached, 120)


def test_gangs_come_whole_borrow_and_give_way(sides: tuple[Side, Side]) -> None:
    left, right = sides
    # Room for 16 pods: five gangs. One pod of the sixth would fit, and does not come.
    low = left.gangs(8, "low")
    settled("what one team gets while the other rests", left, right, gangs=(5, 0))

    def used() -> tuple[str, str]:
        """Kueue tells it once a second."""
        queue = call("GET", f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{left.looks.namespace}")
        found = queue["status"]["flavorsUsage"][0]["resources"]
        return next((one["total"], one["borrowed"]) for one in found if one["name"] == "nvidia.com/gpu")

    wait("what is told of it", lambda: used() == ("120", "56"), 30)

    # What is lent comes back whatever the priorities, as far as it is one's own: its third gang would borrow.
    theirs = right.gangs(3, "low")
    settled("what both get", left, right, gangs=(3, 2))
    assert len(left.looks.preempted(*TAKEN_BACK)) == 2
    assert not right.looks.preempted(*TAKEN_BACK)

    # An urgent gang takes the place of one of its own team.
    (urgent,) = left.gangs(1, "urgent")
    wait("the urgent gang", lambda: urgent in left.looks.admitted(), 120)
    settled("what both get beside it", left, right, gangs=(3, 2))
    assert len(left.looks.preempted("InClusterQueue")) == 1
    assert right.looks.admitted() < theirs

    # Who was preempted is still in the queue, and comes back when the others have gone.
    for side, gone in ((left, {urgent}), (right, theirs)):
        for name in gone:
            side.stage.backends["PyTorchJob"].delete(name, side.looks.namespace, grace_seconds=0)
    settled("what comes back", left, right, gangs=(5, 0))
    assert left.looks.admitted() < low
    assert set(left.looks.conditions()) == low


RACKS = {"north-1": "left", "north-2": "right", "south-1": "left", "south-2": "right"}
"""Nodes by the end of their name, and their rack: in the order of names racks take turns."""


@pytest.fixture
def racks() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A flavor of pretend nodes that stand in racks, and the rack of each."""
    core, mark = client.CoreV1Api(admin()), uuid.uuid4().hex[:8]
    size = {"cpu": "8", "memory": "32G", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    names = {f"{mark}-{end}": rack for end, rack in RACKS.items()}
    where = {"labels": {"test.local/hall": mark}, "topology": ["test.local/hall", "test.local/rack"]}
    try:
        for name, rack in names.items():
            labels = {"test.local/hall": mark, "test.local/rack": f"{mark}-{rack}", "kubernetes.io/hostname": name}
            taint = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
            core.create_node(
                {
                    "metadata": {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
                    "spec": {"taints": [taint]},
                    "status": {"capacity": size, "allocatable": size},
                }
            )
        yield {**ON_PRETEND, **where}, {name: f"{mark}-{rack}" for name, rack in names.items()}
    finally:
        for name in names:
            with suppress(ApiException):
                core.delete_node(name)


def test_gangs_come_together_in_a_rack_and_ranks_follow_the_racks(
    namespaces: list[str], racks: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    flavor, rack_of = racks
    (path := tmp_path / "teams.yaml").write_text(json.dumps(file := two_teams(namespaces, flavor)))
    with queues(file) as objects:
        told = CliRunner().invoke(app, ["check", str(path)]).stdout
        assert objects[0]["kind"] == "Topology"
        assert objects[0]["metadata"]["name"] not in told, told  # it is as the file has it
        side = Side(namespaces[0], namespaces[0].removeprefix("team-"))

        def gang(nodes: int, how: str) -> str:
            notes = {f"kueue.x-k8s.io/podset-{how}-topology": "test.local/rack"}
            notes |= {"kueue.x-k8s.io/podset-group-name": "gang"}
            (name,) = side.gangs(1, nodes=nodes, pod_annotations=notes, tolerations=PRETEND["tolerations"])
            return name

        def places(name: str) -> list[str]:
            """The rack of each rank, once all pods have their node."""

            def found() -> list[str] | None:
                snapshot = side.stage.backends["PyTorchJob"].read(name, side.looks.namespace)
                nodes = {PYTORCH_JOB.node_rank(pod, snapshot.job): pod["spec"].get("nodeName") for pod in snapshot.pods}
                return [rack_of[nodes[rank]] for rank in sorted(nodes)] if nodes and all(nodes.values()) else None

            wait(f"the places of {name}", lambda: name in side.looks.admitted() and found(), 60)
            return found() or []

        def gone(name: str) -> None:
            side.stage.backends["PyTorchJob"].delete(name, side.looks.namespace, grace_seconds=0)
            wait("its pods to go", lambda: not side.looks.pods()[name], 60)

        # Four nodes of two racks: in the ring of the ranks no more than two neighbours are in different ones.
        four = places(whole := gang(4, "preferred"))
        assert sorted(four) == sorted(rack_of.values())
        assert sum(left != right for left, right in pairwise([*four, four[0]])) == 2, four
        gone(whole)

        # Two gangs of two: each has a rack to itself.
        pairs = [places(gang(2, how)) for how in ("required", "preferred")]
        assert [len(pair) for pair in pairs] == [2, 2]
        assert [len(set(pair)) for pair in pairs] == [1, 1]

        # What must be in one rack rather waits, and it is told why.
        late = gang(2, "required")
        stage = side.stage.backends["PyTorchJob"]

        def why() -> str:
            snapshot = stage.read(late, side.looks.namespace)
            return observe(snapshot.job, snapshot.pods, snapshot.events).message

        wait("the reason", lambda: "topology" in why(), 60)
        assert late not in side.looks.admitted()


def test_a_share_follows_the_weights(namespaces: list[str]) -> None:
    mark = namespaces[0].removeprefix("team-")
    file = two_teams(namespaces, ON_PRETEND)
    (flavor,), (cohort,) = file["flavors"], file["cohorts"]
    file["cohorts"][cohort] = {"shared": {flavor: {**ROOM, "gpus": 64}}}
    for name, weight in zip(namespaces, (3, 1), strict=True):
        file["teams"][name] |= {"weight": weight, "quota": {flavor: dict.fromkeys(ROOM, 0)}}
    with queues(file):
        status = call("GET", f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{namespaces[0]}")["status"]
        if "fairSharing" not in status:
            pytest.skip("Kueue's configuration here has no fairSharing, without which weights count for nothing")
        left, right = (Side(name, mark) for name in namespaces)
        left.gangs(8, nodes=1)
        wait("all of it", lambda: len(left.looks.admitted()) == 8, 120)
        right.gangs(8, nodes=1)
        wait("shares of three to one", lambda: (len(left.looks.admitted()), len(right.looks.admitted())) == (6, 2), 120)
        assert len(left.looks.preempted("InCohortFairSharing")) == 2


def test_a_priority_of_others_is_refused(namespaces: list[str]) -> None:
    file = two_teams(namespaces, ON_PRETEND)
    low, urgent = file["priorities"]
    file["teams"][namespaces[1]]["priorities"] = [low]
    with queues(file):
        stage = Stage(admin(), namespaces[1])
        wishes: dict[str, Any] = {"queue": "training", "gpus": 1, **PRETEND}

        def refused() -> str:
            try:
                stage.submit(SLEEP, **wishes, queue_priority=urgent)
            except Exception as error:
                return str(error)
            stage.clear()  # the API server has not read the policy yet
            return ""

        assert f"priority {urgent} is not one of the team; it has {low}" in wait("the refusal", refused, 60)
        # Without one it would have 0, or what its pods' PriorityClass says: the scheduler goes by that even beside one.
        with pytest.raises(JobRefusedError, match=f"a job of the team needs a priority.* it has {low}"):
            stage.submit(SLEEP, **wishes)
        first: dict[str, Any] = {"queue_priority": low, "priority_class": "system-cluster-critical"}
        whole: dict[str, Any] = {"queue_priority": low, "scheduling": {"priorityClass": "system-cluster-critical"}}
        for kind, more in ((PYTORCH_JOB, first), (INDEXED_JOB, first), (PYTORCH_JOB, whole)):
            with pytest.raises(JobRefusedError, match="pods of the team have no PriorityClass"):
                stage.submit(SLEEP, kind, **wishes, **more)
        job: Job = stage.submit(SLEEP, **wishes, queue_priority=low)
        job.running()  # Kueue and the operator have changed it meanwhile
        path = f"/apis/kubeflow.org/v1/namespaces/{namespaces[1]}/pytorchjobs/{job.name}"

        def change(priority: str | None) -> str:
            """How it is refused; nothing if the operator has changed the job in between."""
            with pytest.raises(ApiException) as refusal:
                call("PUT", path, _relabelled(call("GET", path), priority))
            return "" if refusal.value.status == 409 else str(refusal.value)

        assert "is not one of the team" in wait("the refusal", lambda: change(urgent), 60)
        assert "a job of the team needs a priority" in wait("the refusal", lambda: change(None), 60)
        other = Stage(admin(), namespaces[0])
        other.submit(SLEEP, **wishes, queue_priority=urgent).running()
        for one in (stage, other):
            one.close()


def _relabelled(job: dict[str, Any], priority: str | None) -> dict[str, Any]:
    labels = job["metadata"]["labels"]
    del labels[PRIORITY]
    labels |= {} if priority is None else {PRIORITY: priority}
    return job


def test_what_a_cluster_has_otherwise_is_told(namespaces: list[str], tmp_path: Path) -> None:
    mark, path = namespaces[0].removeprefix("team-"), tmp_path / "teams.yaml"
    file = two_teams(namespaces, ON_PRETEND)
    path.write_text(json.dumps(file))
    low, _ = file["priorities"]

    def told() -> list[str]:
        """What is told of this test's own objects: others may be at work."""
        done = CliRunner().invoke(app, ["check", str(path)])
        lines = [line for line in done.output.splitlines() if mark in line or namespaces[1] in line]
        assert done.exit_code == 1 or not lines, done.exception
        return lines

    missing = told()
    assert f"ResourceFlavor nodes-{mark} is missing" in missing
    assert f"LocalQueue training of namespace {namespaces[1]} is missing" in missing
    with queues(file) as objects:
        assert len(missing) == len(objects) == 8
        assert told() == []

        queue = next(one for one in objects if one["kind"] == "ClusterQueue")
        quota = {"name": "nvidia.com/gpu", "nominalQuota": "64"}
        assert quota in queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
        changed = call("GET", path_of(queue))
        changed["spec"]["stopPolicy"] = "Hold"
        changed["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"] = "1k"  # the same
        changed["spec"]["resourceGroups"][0]["flavors"][0]["resources"][2]["nominalQuota"] = "8"
        call("PUT", path_of(queue), changed)
        del file["priorities"][low]
        file["teams"][namespaces[1]]["weight"] = 3
        path.write_text(json.dumps(file))
        where = f"ClusterQueue {namespaces[0]}"
        inactive = [
            f"{where} admits nothing: Can't admit new workloads: is stopped.",
            f"LocalQueue training of namespace {namespaces[0]} admits nothing: "
            "Can't submit new workloads to clusterQueue",
        ]
        lines = wait("what Kueue says of it", lambda: set(inactive) <= set(lines := told()) and lines, 60)
        weightless = "counts for nothing until Kueue's configuration has `fairSharing`"
        assert [line for line in lines if weightless not in line] == [
            f"{where}: spec.resourceGroups[0].flavors[nodes-{mark}].resources[nvidia.com/gpu].nominalQuota is 8, "
            "not 64",
            f"{where}: spec.stopPolicy is Hold, and the file says nothing of it",
            *inactive,
            f"ClusterQueue {namespaces[1]}: spec.fairSharing.weight is 1, not 3",
            f"WorkloadPriorityClass {low} is there, and the file has it no more: delete it",
        ]
