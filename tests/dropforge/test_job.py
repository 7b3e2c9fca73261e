"""What a run's jobs tell the operator about themselves."""

from __future__ import annotations

from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.waiting.joblog import LOG_ANNOTATION

from dropforge import layout
from dropforge.job import asked_job, evaluate_job, tokenise_job, train_job
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, merge
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
