"""The fine-tune DAG, unchanged, by Kubeflow Trainer: TrainJobs in a namespace that takes restricted pods alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from dropforge import tracking
from dropforge.cli.job_manifests import runtime_of
from dropforge.client.drops import wait_for_run
from dropforge.install.rights import ENFORCED
from tests.cluster.conftest import Namespace, opened, secret, where_python_is
from tests.e2e.harness import Stack, typed
from tests.kubeflow_training.rights import ACCOUNT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_TRAINER = ("trainer.kubeflow.org", "v1alpha1")


@pytest.fixture
def restricted(
    stack: Stack, namespace: Namespace, presets: Path, machine_node: Any, tmp_path: Path
) -> Iterator[Namespace]:
    """A namespace with a runtime, in which the stack's account may have TrainJobs, and a preset that names no kind."""
    with opened(machine_node, tmp_path, "train-job", machine="/") as made:
        made.core.patch_namespace(made.name, {"metadata": {"labels": {ENFORCED: "restricted"}}})
        group = "rbac.authorization.k8s.io"
        for role in (ACCOUNT, f"{ACCOUNT}-train-job"):
            binding = {
                "metadata": {"name": f"{role}-stack"},
                "roleRef": {"apiGroup": group, "kind": "Role", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name}],
            }
            client.RbacAuthorizationV1Api().create_namespaced_role_binding(made.name, binding)
        made.custom.create_namespaced_custom_object(*_TRAINER, made.name, "trainingruntimes", runtime_of(made.name))
        keys = secret(stack.folder, made.name)
        keys["stringData"] |= where_python_is()
        made.core.create_namespaced_secret(made.name, keys)
        (presets / "trainer.yaml").write_text(
            yaml.safe_dump({"extends": "cluster", "compute": {"namespace": made.name, "kind": "auto"}})
        )
        yield made


def test_a_drop_becomes_a_registered_model_by_train_jobs_although_a_pod_is_lost(
    stack: Stack, restricted: Namespace, sample: dict[str, Path]
) -> None:
    drop = stack.drop("by-train-job", "one", sample, "extends: trainer\n")
    run = wait_for_run(stack.connection, drop)
    stack.see_checkpoint(run)
    gang = restricted.running()
    assert [name.split("-node-0-")[1][0] for name in gang] == ["0", "1"]
    told = typed(stack, "top", "by-train-job", "--json")
    assert [rank["pod"] for rank in json.loads(told.stdout)["ranks"]] == gang, told.stderr
    restricted.kill(gang[1])

    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 5
    assert stack.champion("by-train-job") == tracked.data.tags[tracking.TAG_VERSION]
    assert "[node-1]" in stack.log(run, "train")
    jobs = restricted.custom.list_namespaced_custom_object(*_TRAINER, restricted.name, "trainjobs")["items"]
    assert {job["metadata"]["labels"]["dropforge/purpose"] for job in jobs} == {"train", "evaluate"}
    assert not restricted.running()
