"""What a run's jobs tell the operator about themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest
from kubeflow_training.jobs.kinds import KINDS, PYTORCH_JOB, TRAIN_JOB, Kind, kind_of
from kubeflow_training.jobs.kubernetes.discovery import Served
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.waiting.joblog import LOG_ANNOTATION

from dropforge import layout
from dropforge.cli.job_manifests import manifest_of, runtime_of
from dropforge.errors import DropforgeError, RecipeError
from dropforge.job import (
    SECRET,
    asked_job,
    check_requested_disk,
    evaluate_job,
    job_kind,
    network_job,
    tokenise_job,
    train_job,
)
from dropforge.network_bench import Order
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, merge, parse_recipe
from dropforge.run import RunSpec

RECIPE = load_recipe("tiny")
SPEC = RunSpec("fam-1", "fam", 1, "s3://b/runs/fam-1", "s3://b", "s3://b/m.json", "ab", RECIPE.plain(), "code")


def test_the_training_names_the_folder_of_its_whole_log() -> None:
    job = pytorch_job(**train_job(SPEC, RECIPE))
    assert job["metadata"]["annotations"][LOG_ANNOTATION] == f"s3://b/{layout.logs_prefix('fam-1')}"


def test_a_job_from_before_is_still_the_same_job() -> None:
    job = pytorch_job(**train_job(SPEC, RECIPE))
    arguments = train_job(SPEC, RECIPE)
    del arguments["annotations"][LOG_ANNOTATION]
    assert fingerprint(pytorch_job(**arguments)) == fingerprint(job)


def test_the_evaluation_keeps_no_log_and_names_none() -> None:
    assert LOG_ANNOTATION not in pytorch_job(**evaluate_job(SPEC, RECIPE))["metadata"]["annotations"]


CLUSTER = {
    "backend": "kubernetes",
    "namespace": "ml",
    "nodes": 2,
    "gpus": 8,
    "processes_per_node": 8,
    "instance": "p5.48xlarge",
    "queue": "team",
    "topology": "rack",
    "image_pull_secrets": ["login"],
    "service_account": "trainer",
    "shared_memory_gb": 8,
    "annotations": {"a/b": "c"},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "volumes": [{"claim": "data", "path": "/data"}],
}
"""All that a recipe can ask of its pods, but for a PriorityClass."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_job_of_a_run_can_be_of_every_kind(kind: Kind) -> None:
    text = {"base": {"scratch": {}}, "train": {"tokens_per_step": 1 << 20}, "compute": CLUSTER}
    recipe = parse_recipe(json.dumps(text))
    for arguments in (
        train_job(SPEC, recipe),
        tokenise_job(SPEC, recipe),
        evaluate_job(SPEC, recipe),
        asked_job(SPEC, recipe, "export-step-1", "s3://b/o.json"),
        network_job(recipe.compute, "bench-network-1", Order(8, "efa", [1], 1.0, 1.0)),
    ):
        manifest = manifest_of(arguments, kind)
        kind.require_valid(manifest)
        assert kind_of(manifest) is kind


@pytest.mark.parametrize(
    ("compute", "ranks"),
    [
        ({"gpus": 8}, 8),
        ({"gpus": 8, "nodes": 2, "parallel": "fsdp"}, 8),
        ({"gpus": 1}, 1),
        ({"processes_per_node": 4}, 1),  # they would share the cores, and each hold the model
        ({"processes_per_node": 4, "parallel": "fsdp"}, 4),
    ],
)
def test_a_comparison_has_a_process_for_each_gpu_and_each_share_of_the_weights(
    compute: dict[str, Any], ranks: int
) -> None:
    compute = {"backend": "kubernetes", "processes_per_node": compute.get("gpus") or 1, **compute}
    recipe = parse_recipe(
        json.dumps({"base": {"scratch": {}}, "train": {"tokens_per_step": 1 << 20}, "compute": compute})
    )
    found = evaluate_job(SPEC, recipe)
    assert (found["nodes"], found["processes_per_node"]) == (1, ranks)
    assert pytorch_job(**found)["spec"]["nprocPerNode"] == str(ranks)


def _resources(value: Any) -> Iterator[dict[str, dict[str, str]]]:
    """Each `resources` of a manifest, a TrainJob's `resourcesPerNode` too."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else []):
        if key in ("resources", "resourcesPerNode"):
            yield inner
        else:
            yield from _resources(inner)


def _disks(recipe: Recipe, kind: Kind) -> list[tuple[str | None, str | None]]:
    """What the pods that have the model ask of their disk, and may take of it."""
    found = []
    for build in (train_job, evaluate_job):
        manifest = manifest_of(build(SPEC, recipe), kind)
        kind.require_valid(manifest)
        given = [
            one
            for one in _resources(manifest)
            if one["requests"]["memory"] == f"{recipe.compute.memory_gb * 1000:.0f}M"
        ]
        found += {tuple(one[part].get("ephemeral-storage") for part in ("requests", "limits")) for one in given}
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_pods_ask_for_the_disk_that_base_and_exported_model_take(kind: Kind) -> None:
    def disks(base: str = "meta-llama/Llama-3.1-8B", **compute: object) -> list[tuple[str | None, str | None]]:
        return _disks(
            parse_recipe(json.dumps({"base": {"model": base}, "compute": {"backend": "kubernetes", **compute}})), kind
        )

    weights = 8_030_261_248
    assert disks() == [(f"{ceil(6 * weights / 1e9)}G", None)] * 2
    cached = {"data_cache": "/cache/models", "volumes": [{"claim": "cache", "path": "/cache", "read_only": False}]}
    assert disks(**cached) == [(f"{ceil(4 * weights / 1e9)}G", None)] * 2
    assert disks(ephemeral_storage_gb=60) == [("60000M", "60000M")] * 2
    for none in ({"queue": "team"}, {"env": {"TMPDIR": "/cache"}}):
        assert disks(**none) == [(None, None)] * 2
    assert disks("s3://models/unknown") == disks("Qwen/Qwen2.5-0.5B") == [(None, None)] * 2


def test_a_base_whose_files_are_more_than_the_instances_disk_is_refused() -> None:
    def of(instance: str, **compute: object) -> Recipe:
        asked = {"backend": "kubernetes", "instance": instance, "gpus": 1, **compute}
        return parse_recipe(json.dumps({"base": {"model": "meta-llama/Llama-3.1-70B"}, "compute": asked}))

    check_requested_disk(of("p5.4xlarge"))
    check_requested_disk(of("g5.xlarge", env={"TMPDIR": "/cache"}))
    with pytest.raises(RecipeError, match=r"`base`: g5.xlarge has disks of 250 GB, not 424 GB.*Take a smaller one"):
        check_requested_disk(of("g5.xlarge"))


def test_pods_of_a_train_job_have_the_keys_that_others_get_themselves() -> None:
    (group,) = runtime_of("ml")["spec"]["template"]["spec"]["replicatedJobs"]
    pod = group["template"]["spec"]["template"]["spec"]
    recipe = parse_recipe(json.dumps({"base": {"scratch": {}}, "compute": {"backend": "kubernetes"}}))
    (other,) = PYTORCH_JOB.pod_specs(pytorch_job(**evaluate_job(SPEC, recipe)))
    assert pod["containers"][0]["envFrom"] == other["containers"][0]["envFrom"] == [{"secretRef": {"name": SECRET}}]
    assert pod["automountServiceAccountToken"] is other["automountServiceAccountToken"] is False


def test_a_train_job_says_nothing_that_a_queue_takes_away() -> None:
    recipe = parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes, queue: team}")
    for arguments in (train_job(SPEC, recipe), network_job(recipe.compute, "bench", Order(8, "efa", [1], 1.0, 1.0))):
        (patch,) = TRAIN_JOB.pod_specs(manifest_of(arguments, TRAIN_JOB))
        assert "terminationGracePeriodSeconds" not in patch
    slow = parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes, grace_seconds: 90}")
    (patch,) = TRAIN_JOB.pod_specs(manifest_of(train_job(SPEC, slow), TRAIN_JOB))
    assert patch["terminationGracePeriodSeconds"] == 90
    (group,) = runtime_of("ml")["spec"]["template"]["spec"]["replicatedJobs"]
    assert group["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize(
    ("compute", "served", "runtime", "kind"),
    [
        ({"queue": "team"}, ["TrainJob", "PyTorchJob", "Job"], True, "PyTorchJob"),
        ({"queue": "team"}, ["TrainJob", "Job"], True, "Job"),
        ({"queue": "team", "kind": "PyTorchJob"}, ["TrainJob", "PyTorchJob", "Job"], True, "PyTorchJob"),
        ({}, ["TrainJob", "PyTorchJob", "Job"], True, "TrainJob"),
        ({}, ["TrainJob", "PyTorchJob", "Job"], False, "PyTorchJob"),
        ({}, ["TrainJob", "PyTorchJob", "Job"], None, "PyTorchJob"),
        ({}, ["TrainJob", "Job"], None, "TrainJob"),
        ({}, ["Job"], False, "Job"),
        ({"priority_class": "high"}, ["TrainJob", "PyTorchJob", "Job"], True, "PyTorchJob"),
        ({"priority_class": "high"}, ["TrainJob", "Job"], True, "Job"),
        ({"kind": "Job"}, ["TrainJob", "PyTorchJob", "Job"], True, "Job"),
    ],
)
def test_the_kind_is_what_the_cluster_has(
    compute: dict[str, str], served: list[str], runtime: bool | None, kind: str
) -> None:
    recipe = parse_recipe(json.dumps({"base": {"scratch": {}}, "compute": {"backend": "kubernetes", **compute}}))
    assert job_kind(recipe.compute, lambda: Served(tuple(served), runtime)) == kind


@pytest.mark.parametrize(
    ("more", "queued", "whole"),
    [("", True, True), ("", False, False), (", grace_seconds: 90", True, False)],
    ids=["kueue-0.17", "an-older-kueue", "a-grace-of-its-own"],
)
def test_train_jobs_wait_in_a_queue_that_leaves_them_as_they_are(more: str, queued: bool, whole: bool) -> None:
    found = Served(("TrainJob", "PyTorchJob", "Job"), runtime=True, queued=queued)
    text = f"base: {{scratch: {{}}}}\ncompute: {{backend: kubernetes, queue: team{more}, kind: "
    auto, named = (parse_recipe(f"{text}{kind}}}").compute for kind in ("auto", "TrainJob"))
    assert job_kind(auto, lambda: found) == ("TrainJob" if whole else "PyTorchJob")
    if whole:
        assert job_kind(named, lambda: found) == "TrainJob"
    else:
        with pytest.raises(DropforgeError, match=r"Kueue.* takes? away"):
            job_kind(named, lambda: found)


def test_a_cluster_with_train_jobs_alone_needs_their_runtime() -> None:
    recipe = parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes, namespace: ml}")
    with pytest.raises(DropforgeError, match="dropforge manifests runtime --namespace ml"):
        job_kind(recipe.compute, lambda: Served(("TrainJob", "Job"), False))


@pytest.mark.parametrize(
    ("compute", "cause"),
    [
        ("kind: TrainJob", "of one kind"),
        ("backend: kubernetes, kind: TrainJob, priority_class: high", "a TrainJob cannot name one"),
    ],
)
def test_a_kind_that_cannot_be_is_refused_by_its_key(compute: str, cause: str) -> None:
    with pytest.raises(RecipeError, match=cause):
        parse_recipe(f"base: {{scratch: {{}}}}\ncompute: {{{compute}}}")


def test_each_job_has_the_recipes_deadline() -> None:
    """Measuring or exporting a large model may take as long as a short training."""
    recipe = build_recipe(merge(RECIPE.plain(), {"compute": {"deadline_minutes": 95}}))
    jobs = [
        train_job(SPEC, recipe),
        tokenise_job(SPEC, recipe),
        evaluate_job(SPEC, recipe),
        asked_job(SPEC, recipe, "export-step-1", "s3://b/o.json"),
    ]
    specs = [pytorch_job(**job)["spec"] for job in jobs]
    assert [spec["runPolicy"]["activeDeadlineSeconds"] for spec in specs] == [95 * 60] * 4


def test_what_is_done_before_the_training_takes_one_pod_and_no_gpu() -> None:
    recipe = build_recipe(
        merge(RECIPE.plain(), {"compute": {"backend": "kubernetes", "nodes": 2, "gpus": 4, "processes_per_node": 4}})
    )
    (replica,) = pytorch_job(**tokenise_job(SPEC, recipe))["spec"]["pytorchReplicaSpecs"].values()
    (container,) = replica["template"]["spec"]["containers"]
    assert replica["replicas"] == 1
    assert container["command"] == ["python", "-m", "trainer.ahead", "s3://b/runs/fam-1/run.json"]
    assert not [name for name in container["resources"]["limits"] if "gpu" in name]


def test_pods_have_the_account_that_the_preset_names() -> None:
    for account in ("dropforge-trainer", None):
        compute = {"backend": "kubernetes", "service_account": account}
        recipe = build_recipe(merge(RECIPE.plain(), {"compute": compute}))
        for build in (train_job, evaluate_job, tokenise_job):
            for replica in pytorch_job(**build(SPEC, recipe))["spec"]["pytorchReplicaSpecs"].values():
                assert replica["template"]["spec"].get("serviceAccountName") == account


def test_what_the_recipe_says_of_pods_is_in_each_of_its_jobs() -> None:
    given = {
        "backend": "kubernetes",
        "nodes": 2,
        "memory_gb": 16,
        "env": {"HF_HUB_OFFLINE": "1"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "training"}],
        "annotations": {"karpenter.sh/do-not-disrupt": "true"},
        "image_pull_secrets": ["registry-login"],
        "priority_class": "low",
        "ephemeral_storage_gb": 60.5,
        "shared_memory_gb": 4,
    }
    recipe = build_recipe(merge(RECIPE.plain(), {"compute": given}))
    jobs = [build(SPEC, recipe) for build in (train_job, evaluate_job, tokenise_job)]
    jobs.append(asked_job(SPEC, recipe, "export-step-1", "s3://b/o.json"))
    jobs.append(network_job(recipe.compute, "bench", Order(0, "tcp", [1024], 5, 60)))
    for job in jobs:
        for replica in pytorch_job(**job)["spec"]["pytorchReplicaSpecs"].values():
            pod, notes = replica["template"]["spec"], replica["template"]["metadata"]["annotations"]
            (container,) = pod["containers"]
            assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
            assert pod["tolerations"] == [{"key": "dedicated", "operator": "Equal", "value": "training"}]
            assert notes["karpenter.sh/do-not-disrupt"] == "true"
            assert pod["imagePullSecrets"] == [{"name": "registry-login"}]
            assert pod["priorityClassName"] == "low"
            assert container["resources"]["limits"]["ephemeral-storage"] == "60500M"
            (shm,) = [held["emptyDir"] for held in pod["volumes"] if held["name"] == "shm"]
            half = "8000M" if job["name"].startswith("tokenise") else "4000M"
            assert shm == {"medium": "Memory", "sizeLimit": half}


def test_what_the_instance_and_the_topology_ask_for_stays_beside_it() -> None:
    given = {
        "instance": "p5.48xlarge",
        "nodes": 2,
        "queue": "team-a",
        "topology": "rack",
        "tolerations": [{"key": "dedicated"}],
        "annotations": {"a/b": "c"},
        "ephemeral_storage_gb": 60,
    }
    compute = json.dumps({"backend": "kubernetes", **given})
    recipe = parse_recipe(f"extends: tiny\ntrain: {{rows_per_step: 16}}\ncompute: {compute}")
    job = train_job(SPEC, recipe)
    assert [one["key"] for one in job["tolerations"]] == ["nvidia.com/gpu", "dedicated"]
    assert job["pod_annotations"].keys() > {"a/b"}
    assert job["resources"].keys() == {"vpc.amazonaws.com/efa", "ephemeral-storage"}
