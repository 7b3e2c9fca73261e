"""A curation on Kubernetes as manifests: what is asked for stands in both kinds, and what cannot work is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.kinds import SPARK_APPLICATION, kind_of
from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.manifest.rights import container_rights, pod_rights
from kubeflow_training.jobs.observation import Phase, observe
from kubeflow_training.jobs.observation.reasons import EXIT_CODES, RETRYABLE, Reason
from kubeflow_training.jobs.reaping.orphans import Fate, Task, marked, owned, sort

from curation.spark_job.__main__ import exit_code
from curation.spark_job.submit import command
from dropforge.curation_job import _SPARK_VERSION, TEMPLATE, CurationJob, manifest
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.hub import UnreachableError
from dropforge.recipe_spark import SparkCluster
from dropforge.recipes.load import load_recipe

WORK = {"claim": "w", "path": "/shared", "read_only": False}
ASKED: dict[str, Any] = {
    "image": "registry/curation:1",
    "namespace": "team-a",
    "executors": 3,
    "cores": 2,
    "memory": "1g",
    "node_selector": {"kubernetes.io/arch": "arm64"},
    "tolerations": [{"key": "arch", "value": "arm64", "operator": "Equal"}],
    "work_path": "/shared",
    "volumes": [WORK],
}
JOB = CurationJob("a-family-with-a-rather-long-name", "0" * 32, 1, {"base": "x"}, "/shared/x", "r.json")


def made(submit: str, **more: Any) -> tuple[Kind, dict[str, Any]]:
    found = manifest(JOB, "s3://b/job.json", SparkCluster.model_validate({**ASKED, "submit": submit, **more}))
    kind = kind_of(found)
    kind.require_valid(found)
    return kind, found


def test_pods_have_the_rights_of_trainers_and_executors_no_token() -> None:
    _, application = made("operator")
    driver, executor = (application["spec"][role]["template"]["spec"] for role in ("driver", "executor"))
    for pod in (driver, executor):
        assert pod["securityContext"] == pod_rights(10001)
        assert pod["containers"][0]["securityContext"] == container_rights(10001)
    assert executor["automountServiceAccountToken"] is False
    assert driver["automountServiceAccountToken"] is True  # it makes the executors
    assert (
        application["spec"]["driver"]["serviceAccount"] == application["spec"]["executor"]["serviceAccount"] == "spark"
    )
    _, job = made("spark-submit", service_account="dropforge-curation")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    account = "spark.kubernetes.authenticate.executor.serviceAccountName=dropforge-curation"
    assert account in container["args"]
    _, application = made("operator", run_as=None)
    assert "securityContext" not in application["spec"]["driver"]["template"]["spec"]


def test_the_driver_makes_pods_and_has_no_right_to_claims() -> None:
    text = (Path(__file__).parents[2] / "helm-values" / "spark-driver.yaml").read_text()
    (role,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Role")
    (rule,) = role["rules"]
    assert set(rule["resources"]) == {"pods", "services", "configmaps"}
    # Else Spark lists claims for executors, and removes its own at the end: both refused.
    own = "spark.kubernetes.driver.ownPersistentVolumeClaim"
    assert made("operator")[1]["spec"]["sparkConf"][own] == "false"
    (container,) = made("spark-submit")[1]["spec"]["template"]["spec"]["containers"]
    assert f"{own}=false" in container["args"]


def test_the_version_of_spark_is_that_of_the_curation_image() -> None:
    locked = (Path(__file__).parents[2] / "requirements/image-curation.txt").read_text()
    assert f"pyspark=={_SPARK_VERSION}\n" in locked


def test_both_ways_of_submitting_ask_for_the_same_pods() -> None:
    _, application = made("operator")
    _, job = made("spark-submit")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    executor = json.loads(next(item["value"] for item in container["env"] if item["name"] == TEMPLATE))
    assert executor == application["spec"]["executor"]["template"]
    assert application["metadata"] == job["metadata"]
    confs = dict(part.split("=", 1) for part in container["args"] if "=" in part)
    assert application["spec"]["executor"]["instances"] == int(confs["spark.executor.instances"]) == 3
    assert confs["spark.kubernetes.driver.requestTimeout"] == "60000"
    assert application["spec"]["sparkConf"].items() <= confs.items()
    # The operator submits in cluster mode, where this is what Spark takes for Python.
    assert confs["spark.executor.memoryOverheadFactor"] == "0.4"
    for spec in (executor["spec"], application["spec"]["driver"]["template"]["spec"], job["spec"]["template"]["spec"]):
        assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
        assert spec["tolerations"] == [{"key": "arch", "operator": "Equal", "value": "arm64"}]
        (held,) = spec["containers"]
        assert held["envFrom"] == [{"secretRef": {"name": "dropforge-trainer"}}]
        assert held["volumeMounts"][0]["mountPath"] == "/shared"
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "1433Mi"}


def test_the_name_and_identity_are_those_of_what_is_to_be_done() -> None:
    _, first = made("operator")
    other = manifest(
        CurationJob(**{**JOB.__dict__, "recipe": {"base": "y"}}), "s3://b/j", SparkCluster.model_validate(ASKED)
    )
    assert first["metadata"]["name"].startswith("curate-a-family-with-a-rath-")
    assert first["metadata"]["name"] != other["metadata"]["name"]
    assert first == made("operator")[1]


@pytest.mark.parametrize("submit", ["operator", "spark-submit"])
def test_the_reaper_ends_a_curation_whose_task_is_over_and_no_other(submit: str) -> None:
    _, manifest = made(submit)
    owner = Owner("dag", "run", "curate", -1)
    manifest["metadata"]["uid"] = "1"
    manifest["metadata"]["labels"] = {**manifest["metadata"]["labels"], **owner.labels("1.0", 1)}
    manifest["metadata"]["annotations"] = owner.annotations("1.0", 1)
    live = owned([Snapshot(marked(manifest, "me"))], "me")
    for state, fates in (("running", []), ("failed", [Fate.DELETE])):
        assert [orphan.fate for orphan in sort(live, {owner: Task(state)}, 9.0, 0.0).orphans] == fates


def test_workers_with_another_pyspark_make_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = made("operator")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    assert fingerprint(made("operator")[1]) == fingerprint(first)


def test_the_pod_tells_spark_submit_its_address_and_name(tmp_path: Path) -> None:
    server = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    env = {"POD_NAME": "p" * 60, "POD_IP": "10.0.0.9", "SPARK_HOME": "/spark", **server}
    line = command(["--conf", "a=b", "main.py", "s3://b/j"], env, tmp_path / "pod.json")
    assert line[:3] == ["/spark/bin/spark-submit", "--master", "k8s://https://10.96.0.1:6443"]
    assert line[-2:] == ["main.py", "s3://b/j"]
    assert f"spark.kubernetes.driver.pod.name={'p' * 60}" in line
    assert f"spark.kubernetes.executor.podNamePrefix={'p' * 47}" in line
    with pytest.raises(DropforgeError, match="POD_IP"):
        command([], {**env, "POD_IP": ""}, tmp_path / "pod.json")
    with pytest.raises(DropforgeError, match="KUBERNETES_SERVICE_HOST"):
        command([], {**env, "KUBERNETES_SERVICE_HOST": ""}, tmp_path / "pod.json")
    line = command([], {**env, "KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path / "pod.json")
    assert line[2] == "k8s://https://[fd00::1]:6443"


@pytest.mark.parametrize(
    ("kind", "reason", "again"),
    [
        (RecipeError, Reason.USER_ERROR, False),
        (DataError, Reason.BAD_DATA, False),
        (UnreachableError, Reason.UNKNOWN, True),
        (DropforgeError, Reason.UNKNOWN, True),
    ],
)
def test_a_driver_that_lost_spark_or_the_hub_is_tried_again(
    kind: type[DropforgeError], reason: Reason, again: bool
) -> None:
    code = exit_code(kind("curation", "it stopped", "Look"))
    assert EXIT_CODES.get(code, Reason.UNKNOWN) is reason
    assert RETRYABLE[reason] is again


def test_a_job_file_that_is_none_is_refused() -> None:
    assert CurationJob.from_json(JOB.to_json()) == JOB
    for data in (b"", b"[]", b'{"family": 1}', b'{"workdir": "x"}', JOB.to_json().replace(b"/shared/x", b"shared/x")):
        with pytest.raises(DropforgeError, match="curation job"):
            CurationJob.from_json(data)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"volumes": []}, "is in none of the `volumes`"),
        ({"volumes": [{**WORK, "read_only": True}]}, "is read-only: write `read_only: false`"),
        ({"volumes": [{**WORK, "path": "/sharedness"}]}, "is in none"),
        ({"volumes": [{**WORK, "storage": "node"}]}, "own disk.*which the pods do not share"),
        ({"work_path": "/shared/../etc"}, r"has `\.\.` in it"),
        ({"submit": "yarn"}, "operator"),
        ({"memory": "2GB"}, "memory"),
        ({"executors": 0}, "executors"),
        ({"image": ""}, "image"),
    ],
)
def test_what_cannot_work_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe("tiny", {"curation": {"engine": "spark", "spark": {"cluster": {**ASKED, **more}}}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"restartPolicy": {"type": "OnFailure"}}, "Write Never"),
        ({"mode": "client"}, "mode: cluster"),
        ({"driver": {"env": [{"name": "A", "value": "1"}]}}, "pod template"),
    ],
)
def test_an_application_that_would_not_be_watched_rightly_is_refused(change: dict[str, Any], words: str) -> None:
    _, application = made("operator")
    application["spec"] |= change
    with pytest.raises(ManifestError, match=words):
        SPARK_APPLICATION.require_valid(application)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("", Phase.QUEUED),
        ("SUBMITTED", Phase.QUEUED),
        ("COMPLETED", Phase.SUCCEEDED),
        ("FAILED", Phase.FAILED),
        ("SUBMISSION_FAILED", Phase.FAILED),
        ("SUSPENDED", Phase.QUEUED),
    ],
)
def test_the_state_of_an_application_is_its_phase(state: str, phase: Phase) -> None:
    _, application = made("operator")
    application["status"] = {"applicationState": {"state": state, "errorMessage": "because"}}
    seen = observe(application)
    assert seen.phase is phase, seen
    if phase is Phase.FAILED:
        assert "because" in seen.message
