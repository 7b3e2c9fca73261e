"""What a run's jobs tell the operator about themselves."""

from __future__ import annotations

import json

from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.waiting.joblog import LOG_ANNOTATION

from dropforge import layout
from dropforge.job import asked_job, evaluate_job, network_job, tokenise_job, train_job
from dropforge.network_bench import Order
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
