"""The API server takes what is rendered for instances of the catalogue: jobs and their pods, by dry run.

The pods are held to Kubernetes' restricted Pod Security Standard.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubeflow_training.jobs.manifest import pytorch_job
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from dropforge.install.rights import ENFORCED
from dropforge.job import evaluate_job, tokenise_job, train_job
from dropforge.placement.catalogue import read
from dropforge.recipes import parse_recipe
from dropforge.run import RunSpec
from tests.e2e.harness import wait
from tests.kubeflow_training.rights import MANIFESTS

pytestmark = pytest.mark.cluster


@pytest.fixture
def restricted() -> Iterator[str]:
    """A namespace that takes no pod with more rights."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    config.load_kube_config()
    core, name = client.CoreV1Api(), f"test-{uuid.uuid4().hex[:10]}"
    core.create_namespace({"metadata": {"name": name, "labels": {ENFORCED: "restricted"}}})
    wait("its account", lambda: core.list_namespaced_service_account(name).items, 30)
    yield name
    core.delete_namespace(name)


def test_jobs_and_pods_for_every_kind_of_instance_pass_the_api_server(restricted: str) -> None:
    custom, core = client.CustomObjectsApi(), client.CoreV1Api()
    kinds = {(one.arch, one.fabric, one.gpus, one.adapters): one for one in read({}).values()}
    for on in kinds.values():
        recipe = parse_recipe(
            "base: {scratch: {}}\ntrain: {tokens_per_step: 65536}\n"
            f"compute: {{backend: kubernetes, nodes: 2, instance: {on.name}, tokenize_ahead: true}}"
        )
        spec = RunSpec("fam-1", "fam", 1, "s3://b/runs/fam-1", "s3://b", "s3://b/m.json", "ab", recipe.plain(), "code")
        for build in (train_job, evaluate_job, tokenise_job):
            manifest = pytorch_job(**build(spec, recipe))
            manifest["metadata"]["namespace"] = restricted
            custom.create_namespaced_custom_object(
                "kubeflow.org", "v1", restricted, "pytorchjobs", manifest, dry_run="All"
            )
            for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
                pod = {"metadata": {"name": manifest["metadata"]["name"]}, "spec": replica["template"]["spec"]}
                core.create_namespaced_pod(restricted, pod, dry_run="All")
    waits = (MANIFESTS / "init-container.yaml").read_text()  # of the operator, in workers
    for word, value in {"InitContainerImage": "alpine", "MaxTries": "100", "MasterAddr": "x-master-0"}.items():
        waits = waits.replace("{{." + word + "}}", value)
    worker = {**pod["spec"], "initContainers": yaml.safe_load(waits)}
    core.create_namespaced_pod(restricted, {"metadata": {"name": "worker"}, "spec": worker}, dry_run="All")

    recipe = parse_recipe("base: {scratch: {}}\ncompute: {backend: kubernetes, run_as: null}")
    rights = pytorch_job(**train_job(spec, recipe))["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    with pytest.raises(ApiException, match="violates PodSecurity"):
        core.create_namespaced_pod(restricted, {"metadata": {"name": "image"}, "spec": rights}, dry_run="All")
    pod["spec"]["nodeSelector"] = {"not a label": "x"}
    with pytest.raises(ApiException, match="Invalid value"):  # the server looks at what is asked of it
        core.create_namespaced_pod(restricted, pod, dry_run="All")
