"""The fine-tune DAG, unchanged, with a gang of two pods on a real cluster, one of which is lost in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

import curation
from dropforge import dataset, layout, ledger, tracking
from dropforge.client.drops import wait_for_run
from dropforge.drop import read_drop
from dropforge.recipes.load import load_recipe
from dropforge.store import FolderStore
from tests.cluster.conftest import Namespace, secret
from tests.cluster.spark_place import NAMESPACE as SPARK_NAMESPACE
from tests.cluster.spark_place import Place
from tests.e2e.harness import Stack, wait
from tests.kubeflow_training.rights import documents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAMILY = "on-cluster"


@pytest.mark.smoke
def test_a_drop_becomes_a_registered_model_although_a_pod_is_lost(
    stack: Stack, namespace: Namespace, sample: dict[str, Path]
) -> None:
    drop = stack.drop(FAMILY, "one", sample, None)
    run = wait_for_run(stack.connection, drop)
    stack.see_checkpoint(run)
    gang = namespace.running()
    assert [name.rsplit("-", 2)[1] for name in gang] == ["master", "worker"]
    namespace.kill(next(name for name in gang if "worker" in name))

    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["compute.backend"] == "kubernetes"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 5
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION]
    log = stack.log(run, "train")
    assert "[worker-0]" in log
    assert "resuming from checkpoint step-" in log
    assert {condition["type"] for job in namespace.jobs() for condition in job["status"]["conditions"]} >= {"Succeeded"}
    assert not namespace.running()


@pytest.fixture
def spark(stack: Stack, namespace: Namespace, place: Place) -> Place:
    """The stack's account may make SparkApplications too, and their pods reach the stack."""
    shipped = documents(namespace.name, "spark", "events")
    place.add(document for document in shipped if document["kind"] != "ServiceAccount")
    place.give_secret(secret(stack.folder, SPARK_NAMESPACE)["stringData"])
    return place


BY_SPARK = "extends: by-spark\n"
"""A preset whose curation is a driver and two executors."""


def test_a_drop_goes_through_a_spark_application_to_two_pods_and_a_registered_model(
    stack: Stack, namespace: Namespace, spark: Place, sample: dict[str, Path], tmp_path: Path
) -> None:
    drop = stack.drop("by-spark", "one", sample, BY_SPARK)
    run = wait_for_run(stack.connection, drop)
    pods: dict[str, set[str]] = {"driver": set(), "executor": set(), "gang": set()}

    def ended() -> bool:
        for role in ("driver", "executor"):
            pods[role].update(spark.pods(role))
        pods["gang"].update(namespace.running())
        return stack.state(run) in {"success", "failed"}

    wait(f"the end of {run}", ended, 500)
    assert stack.state(run) == "success", stack.log(run, "curate") + stack.log(run, "train")
    assert {role: len(names) for role, names in pods.items() if role != "gang"} == {"driver": 1, "executor": 2}
    assert len([name for name in pods["gang"] if "-master-" in name or "-worker-" in name]) >= 2
    (tracked,) = stack.tracked(run)
    assert stack.champion("by-spark") == tracked.data.tags[tracking.TAG_VERSION]
    log = stack.log(run, "curate")
    assert "[driver]" in log

    # The dataset is the one that this machine makes of the same files.
    local = FolderStore(tmp_path / "local")
    for name, path in sample.items():
        local.put(f"drops/by-spark/one/{name}", path.read_bytes())
    local.put("drops/by-spark/one/_SUCCESS", b"")
    found = read_drop(local, "by-spark", "one")
    ledger.record(local, found)
    expected = curation.curate(local, found, load_recipe("tiny"), workdir=tmp_path / "work")
    key = layout.manifest_key("by-spark", expected.digest)
    made = dataset.Manifest.from_json(stack.connection.store.get(key))
    assert made.counts == expected.counts
    assert f"input: {made.counts['input']} rows" in log
    assert made.shards == expected.shards


def test_a_cancelled_curation_frees_its_pods(stack: Stack, spark: Place, sample: dict[str, Path]) -> None:
    drop = stack.drop("spark-cancelled", "one", sample, BY_SPARK)
    run = wait_for_run(stack.connection, drop)
    wait("the executors", lambda: spark.pods("executor"))
    stack.cancel(run)
    wait("the end of the pods", lambda: not spark.pods("driver") and not spark.pods("executor"), 60)
    wait("the end of the application", lambda: not spark.applications(), 60)
