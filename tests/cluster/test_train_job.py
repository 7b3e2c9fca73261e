"""The fine-tune DAG, unchanged, by Kubeflow Trainer: TrainJobs in a namespace that takes restricted pods alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from dropforge import tracking
from dropforge.cli.gangs import Gangs, places
from dropforge.cli.job_manifests import runtime_of
from dropforge.client.drops import wait_for_run
from dropforge.install.rights import ENFORCED
from tests.cluster.conftest import Namespace, opened, secret, where_python_is
from tests.e2e.harness import Stack
from tests.kubeflow_training.rights import ACCOUNT
from trainer.report.job_status import URL

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
        compute: dict[str, Any] = {"namespace": made.name, "kind": "auto"}
        (presets / "trainer.yaml").write_text(yaml.safe_dump({"extends": "cluster", "compute": compute}))
        # The machine has room for one of these pods.
        compute |= {"cpus": 0.6 * int(machine_node.status.allocatable["cpu"]), "min_nodes": 1}
        compute["queue_timeout_minutes"] = 1
        few = {"extends": "cluster", "train": {"max_steps": 10}, "compute": compute}
        (presets / "few.yaml").write_text(yaml.safe_dump(few))
        yield made


def test_a_drop_becomes_a_registered_model_by_train_jobs_although_a_pod_is_lost(
    stack: Stack, restricted: Namespace, sample: dict[str, Path]
) -> None:
    drop = stack.drop("by-train-job", "one", sample, "extends: trainer\n")
    run = wait_for_run(stack.connection, drop)
    stack.see_checkpoint(run)
    gang = restricted.running()
    assert [name.split("-node-0-")[1][0] for name in gang] == ["0", "1"]
    seen = Gangs(places("kubernetes"), restricted.name, run).newest()
    assert seen is not None
    assert sorted(pod["metadata"]["name"] for pod in seen.snapshot.pods) == gang
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


def test_a_train_job_s_status_has_its_progress(stack: Stack, restricted: Namespace, sample: dict[str, Path]) -> None:
    run = wait_for_run(stack.connection, stack.drop("progress", "one", sample, "extends: trainer\n"))
    stack.see_checkpoint(run)
    (pod, _) = restricted.running()
    (trainer,) = restricted.core.read_namespaced_pod(pod, restricted.name).spec.containers
    if URL not in {each.name for each in trainer.env}:
        pytest.skip("this Trainer's feature gate TrainJobStatus is off")
    assert stack.end(run) == "success", stack.log(run, "train")
    jobs = restricted.custom.list_namespaced_custom_object(*_TRAINER, restricted.name, "trainjobs")["items"]
    (status,) = [job["status"] for job in jobs if job["metadata"]["labels"]["dropforge/purpose"] == "train"]
    told = status["trainerStatus"]
    assert (told["progressPercentage"], told["estimatedRemainingSeconds"]) == (100, 0)
    assert {"loss", "learning_rate"} <= {metric["name"] for metric in told["metrics"]}


def test_a_training_whose_nodes_do_not_come_starts_with_those_that_are_there(
    stack: Stack, restricted: Namespace, sample: dict[str, Path]
) -> None:
    run = wait_for_run(stack.connection, stack.drop("few", "one", sample, "extends: few\n"))
    assert stack.end(run) == "success", stack.log(run, "train")
    log = stack.log(run, "train")
    assert "attempt 2 starts with 1 nodes" in log
    (tracked,) = stack.tracked(run)
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "1"  # the first had no pod that ran
    jobs = restricted.custom.list_namespaced_custom_object(*_TRAINER, restricted.name, "trainjobs")["items"]
    assert [job["spec"]["trainer"]["numNodes"] for job in jobs if "-g2" in job["metadata"]["name"]] == [1]
