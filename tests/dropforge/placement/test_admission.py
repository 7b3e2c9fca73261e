"""Whether a recipe fits its team's queue, and whether a cluster's objects are those of the file."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

import pytest
from kubeflow_training.jobs.manifest import pytorch_job
from kubernetes.utils.quantity import parse_quantity

from dropforge.errors import RecipeError
from dropforge.job import evaluate_job, train_job
from dropforge.placement.admission import differences, room_for
from dropforge.placement.queues import render
from dropforge.placement.teams_file import parse_teams
from dropforge.recipe import Recipe
from dropforge.recipes.load import parse_recipe
from dropforge.run import RunSpec

TEAMS = parse_teams("""
flavors: {gpu: {labels: {type: gpu}}, cpu: {}}
priorities: {low: -1, normal: 0, high: 1}
cohorts: {both: {}}
teams:
  vision:
    cohort: both
    weight: 2
    quota: {gpu: {gpus: 8, cpus: 64, memory_gb: 256}, cpu: {cpus: 16, memory_gb: 64}}
    priorities: [low, normal]
  language:
    queue: words
    cohort: both
    quota: {gpu: {gpus: 16, cpus: 128, memory_gb: 512}}
  alone: {namespace: vision, priorities: [], quota: {cpu: {cpus: 1, memory_gb: 4}}}
""")


def recipe(compute: str) -> Recipe:
    text = "extends: tiny\ntrain: {tokens_per_step: 65536}\n"
    return parse_recipe(f"{text}compute: {{backend: kubernetes, {compute}}}")


def asked(compute: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe and the job that it becomes."""
    chosen = recipe(compute)
    return chosen, train_job(spec_of(chosen), chosen)


def spec_of(chosen: Recipe) -> RunSpec:
    return RunSpec("r", "f", 1, "s3://b/runs/r", "s3://b", "s3://b/d", "0" * 64, chosen.plain(), "c")


GANG = "namespace: vision, queue: vision, cpus: 8, memory_gb: 32, gpus: 4, processes_per_node: 4"


@pytest.mark.parametrize(
    ("compute", "own", "borrowed"),
    [
        (f"{GANG}, priority: normal, nodes: 2", ("gpu",), ()),
        (f"{GANG}, nodes: 4, priority: low", (), ("gpu",)),
        ("namespace: vision, queue: vision, priority: low, cpus: 16, memory_gb: 64", ("gpu", "cpu"), ()),
        ("namespace: vision, queue: vision, priority: low, cpus: 32, memory_gb: 64", ("gpu",), ()),
        ("namespace: language, queue: words, priority: high, cpus: 150", (), ("gpu",)),
    ],
)
def test_flavors_with_room_are_told(compute: str, own: tuple[str, ...], borrowed: tuple[str, ...]) -> None:
    found = room_for(TEAMS, *asked(compute))
    assert (found.own, found.borrowed) == (own, borrowed)


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        ("namespace: visoin, queue: vision", r"`compute.namespace`: no team has the namespace .*Did you mean 'vision'"),
        ("namespace: xyz", r"`compute.namespace`: .*Choose one of language, vision"),
        ("namespace: language", r"`compute.queue`: it is missing, and its pods would compete .*Set it to 'words'"),
        ("namespace: language, queue: language", r"`compute.queue`: namespace 'language' has no queue .*'words'"),
        ("namespace: vision, queue: v", r"Set it to 'vision' or 'alone'"),
        (f"{GANG}, priority: high", r"`compute.priority`: 'high' is no priority of team 'vision'. Choose one of low"),
        (f"{GANG}, priority: lo", r"Did you mean 'low'"),
        (GANG, r"`compute.priority`: it is missing, and team 'vision' has its own. Set it to 'low' or 'normal'"),
        ("namespace: vision, queue: alone, priority: low", r"Leave it out: the team has none"),
        (
            f"{GANG}, priority: low, nodes: 7",
            r"never has room for the job's pods: flavor gpu has 24 nvidia.com/gpu of 28 nvidia.com/gpu; fl",
        ),
        ("namespace: vision, queue: alone, cpus: 2", r"flavor cpu has 1 cpu of 2 cpu"),
    ],
)
def test_what_no_queue_takes_is_refused_with_the_mend(compute: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        room_for(TEAMS, *asked(compute))


def test_devices_and_nodes_that_the_job_asks_for_count_too() -> None:
    chosen, job = asked(f"{GANG}, priority: low")
    with pytest.raises(RecipeError, match=r"flavor gpu has no quota of vpc.amazonaws.com/efa; flavor cpu has"):
        room_for(TEAMS, chosen, {**job, "resources": {"vpc.amazonaws.com/efa": "4"}})
    with pytest.raises(RecipeError, match=r"flavor gpu has type gpu, not tpu; flavor cpu has no quota of nvidia"):
        room_for(TEAMS, chosen, {**job, "node_selector": {"type": "tpu"}})
    assert room_for(TEAMS, chosen, {**job, "node_selector": {"type": "gpu", "zone": "a"}}).own == ("gpu",)


RACKS = parse_teams("""
flavors: {gpu: {labels: {type: gpu}, topology: [block, rack]}, cpu: {labels: {type: cpu}, topology: [zone]}}
teams: {a: {quota: {gpu: {gpus: 64, cpus: 640, memory_gb: 640}, cpu: {cpus: 640, memory_gb: 640}}}}
""")
NEAR = "namespace: a, queue: a, nodes: 2, cpus: 4, memory_gb: 4"


def test_a_gang_that_asks_for_a_rack_finds_room_where_racks_are_known() -> None:
    assert room_for(RACKS, *asked(f"{NEAR}, topology: rack")).own == ("gpu",)
    assert room_for(RACKS, *asked(NEAR)).own == ("gpu", "cpu")
    assert room_for(RACKS, *asked(f"{NEAR}, topology: rack".replace("nodes: 2", "nodes: 1"))).own == ("gpu", "cpu")
    with pytest.raises(RecipeError, match=r"flavor gpu has no shelf in its `topology`; flavor cpu has no shelf in"):
        room_for(RACKS, *asked(f"{NEAR}, topology: shelf"))


@pytest.mark.parametrize(("more", "how"), [("", "preferred"), (", topology_required: true", "required")])
def test_master_and_workers_ask_for_one_rack_as_one_gang(more: str, how: str) -> None:
    _, job = asked(f"{NEAR}, topology: example.com/rack{more}")
    replicas = pytorch_job(**job)["spec"]["pytorchReplicaSpecs"]
    for one in replicas.values():
        notes = one["template"]["metadata"]["annotations"]
        assert {key: value for key, value in notes.items() if key.startswith("kueue.x-k8s.io/")} == {
            f"kueue.x-k8s.io/podset-{how}-topology": "example.com/rack",
            "kueue.x-k8s.io/podset-group-name": "gang",
        }
    chosen, alone = asked(f"{NEAR}, topology: example.com/rack".replace("nodes: 2", "nodes: 1"))
    assert "pod_annotations" not in alone
    assert "pod_annotations" not in evaluate_job(spec_of(chosen), chosen)


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        ("topology: rack", r"`compute.topology`: Kueue does the gang scheduling, and `compute.queue` names none"),
        ("queue: a, topology_required: true", r"`compute.topology_required`: `compute.topology` names no label"),
        ("queue: a, topology: 'a b'", r"`compute.topology`"),
        (
            "queue: a, topology: rack, nodes: 4, instance: g5.12xlarge, gpus: 2, processes_per_node: 2",
            r"`compute.topology`: two pods would fit on one g5.12xlarge, .*Ask for whole instances",
        ),
        ("queue: a, topology: rack, nodes: 2, instance: m7i.2xlarge, cpus: 3, memory_gb: 4", r"two pods would fit on"),
    ],
)
def test_a_rack_that_cannot_be_asked_for_is_refused(compute: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        recipe(compute)


def test_whole_instances_may_ask_for_a_rack() -> None:
    for sizes in ("instance: g5.12xlarge", "instance: m7i.2xlarge, cpus: 3"):
        assert recipe(f"queue: a, topology: rack, nodes: 2, {sizes}").compute.topology == "rack"


def test_this_machine_has_no_queue() -> None:
    with pytest.raises(RecipeError, match=r"`compute.backend`: only pods wait in queues"):
        room_for(TEAMS, parse_recipe("extends: tiny"), {})


def test_the_names_of_the_recipe_are_those_of_the_objects() -> None:
    chosen = recipe(f"{GANG}, priority: low")
    spec = spec_of(chosen)
    objects = {(one["kind"], one["metadata"]["name"]) for one in render(TEAMS)}
    for job in (train_job(spec, chosen), evaluate_job(spec, chosen)):
        assert ("LocalQueue", job["queue"]) in objects
        assert ("WorkloadPriorityClass", job["queue_priority"]) in objects


def answered(one: dict[str, Any]) -> dict[str, Any]:
    """The object as the API server gives it back."""
    found = copy.deepcopy(one)
    found["status"] = {}
    if one["kind"] == "ClusterQueue":
        found["spec"] |= {"flavorFungibility": {"whenCanBorrow": "MayStopSearch"}, "stopPolicy": "None"}
        for flavor in found["spec"]["resourceGroups"][0]["flavors"]:
            for resource in flavor["resources"]:
                resource["nominalQuota"] = str(Decimal(parse_quantity(resource["nominalQuota"])))
    if one["kind"] == "ValidatingAdmissionPolicy":
        found["spec"]["matchConstraints"] |= {"matchPolicy": "Equivalent", "objectSelector": {}}
    return found


def test_what_the_server_adds_and_writes_in_other_words_is_no_difference() -> None:
    for one in render(TEAMS):
        assert differences(one, answered(one), parse_quantity) == []


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("ResourceFlavor", {"nodeLabels": {"type": "tpu"}}, ["spec.nodeLabels.type is tpu, not gpu"]),
        ("ClusterQueue", {"stopPolicy": "Hold"}, ["spec.stopPolicy is Hold, and the file says nothing of it"]),
        ("ClusterQueue", {"cohortName": None}, ["spec.cohortName is missing, not both"]),
        ("ClusterQueue", {"fairSharing": {"weight": "1"}}, ["spec.fairSharing.weight is 1, not 2"]),
        ("ClusterQueue", {"fairSharing": {"weight": "2000m"}}, []),
        ("ClusterQueue", {"resourceGroups": []}, ["spec.resourceGroups is [], not [{'coveredResources': "]),
        ("ClusterQueue", {"admissionChecksStrategy": {}}, ["spec.admissionChecksStrategy is {}, and the file"]),
    ],
)
def test_what_somebody_has_changed_is_told(kind: str, change: dict[str, Any], told: list[str]) -> None:
    one = next(one for one in render(TEAMS) if one["kind"] == kind)
    found = answered(one)
    found["spec"] |= change
    seen = differences(one, found, parse_quantity)
    assert len(seen) == len(told)
    assert all(left.startswith(right) for left, right in zip(seen, told, strict=True)), seen


def test_a_quota_is_told_by_its_resource() -> None:
    one = next(one for one in render(TEAMS) if one["kind"] == "ClusterQueue")
    found = answered(one)
    found["spec"]["resourceGroups"][0]["flavors"][0]["resources"][2]["nominalQuota"] = "9"
    path = "spec.resourceGroups[0].flavors[gpu].resources[nvidia.com/gpu].nominalQuota"
    assert differences(one, found, parse_quantity) == [f"{path} is 9, not 8"]
