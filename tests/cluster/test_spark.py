"""Curation by Spark's pods on a real cluster: the embedded engine's dataset, kills, bad data and placement."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from kubeflow_training.jobs.kinds import kind_of
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.observation.reasons import Reason
from kubernetes import client
from moto.server import ThreadedMotoServer

import curation
from dropforge import ledger
from dropforge.curation_job import CurationJob, manifest
from dropforge.dataset import Manifest
from dropforge.drop import Drop, read_drop
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe, load_recipe
from dropforge.store import FolderStore, Store, open_store
from tests.cluster.spark_place import NAMESPACE, SECRET, WORK, Place, section
from tests.cluster.team_place import NO_IMAGE, built
from tests.e2e.harness import wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def store(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An S3 that pods reach."""
    server = ThreadedMotoServer("0.0.0.0", 0)
    server.start()
    values = {
        "AWS_ENDPOINT_URL": f"http://10.244.0.1:{server.get_host_and_port()[1]}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"  # what a server of this process holds outlives it
    boto3.client("s3").create_bucket(Bucket=bucket)
    place.give_secret({key: value for key, value in os.environ.items() if key.startswith("AWS_")})
    yield open_store(f"s3://{bucket}")
    server.stop()


def files(count: int = 400) -> dict[str, bytes]:
    """Rows that are new, the same, nearly the same, and broken."""
    chance = random.Random(7)
    words = [f"word{number}" for number in range(500)]
    texts = [" ".join(chance.choices(words, k=40)) for _ in range(count)]
    texts += [texts[number] for number in range(20)] + [texts[number] + " more" for number in range(20, 60)]
    lines = [json.dumps({"text": text}).encode() for text in texts] + [b"{broken"]
    return {f"part-{part}.jsonl": b"\n".join(lines[part::3]) + b"\n" for part in range(3)}


def drop_of(store: Store, rows: dict[str, bytes]) -> Drop:
    for key, data in {**rows, "_SUCCESS": b""}.items():
        store.put(f"drops/fam/d1/{key}", data)
    found = read_drop(store, "fam", "d1")
    ledger.record(store, found)
    return found


@dataclass
class Curating:
    """A curation on the cluster, from its job file to its end."""

    place: Place
    backend: KubernetesCluster
    name: str
    job: CurationJob

    def look(self) -> Observation:
        found = self.backend.read(self.name, NAMESPACE)
        return observe(found.job, found.pods, found.events) if found else observe(None)

    def until(self, wanted: Callable[[Observation], Any], seconds: float = 400) -> Observation:
        end, seen = time.monotonic() + seconds, self.look()
        while not wanted(seen):
            if seen.ended or time.monotonic() > end:
                print(self.log())  # shown with the failure
                raise AssertionError(seen)
            time.sleep(0.3)
            seen = self.look()
        return seen

    def splits(self) -> dict[str, int]:
        """What the kernels have finished, with the time of each file."""
        folder = self.place.work / self.job.workdir.removeprefix("/shared/")
        return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("parts/*.json")}

    def log(self) -> str:
        found = self.backend.read(self.name, NAMESPACE)
        return "\n".join(self.backend.tail(found.pods[0], 40)) if found and found.pods else ""


def start(place: Place, store: Store, recipe: Recipe, drop: Drop) -> Curating:
    job = CurationJob("fam", drop.id, 1, recipe.plain(), f"/shared/{drop.id[:8]}", "jobs/result.json")
    store.put("jobs/job.json", job.to_json())
    cluster = recipe.curation.spark.cluster
    assert cluster is not None
    made = manifest(job, f"{store.uri}/jobs/job.json", cluster)
    kind = kind_of(made)
    kind.require_valid(made)
    backend = KubernetesCluster(client.ApiClient(), kind)
    backend.create(made)
    name = made["metadata"]["name"]
    place.undo.append(lambda: backend.delete(name, NAMESPACE, grace_seconds=0))
    return Curating(place, backend, name, job)


def recipe_of(submit: str, **more: Any) -> Recipe:
    cluster = section(submit, **more.pop("cluster", {}))
    spark = {"engine": "spark", "workers": 1, "spark": {"cluster": cluster}, **more}
    return build_recipe(load_recipe("tiny", {"curation": spark}).plain())


def embedded(folder: Path, **more: Any) -> Manifest:
    """What the other engine makes of the same rows."""
    local = FolderStore(folder / "local")
    recipe = load_recipe("tiny", {"curation": {"workers": 1, **more}})
    return curation.curate(local, drop_of(local, files()), recipe, workdir=folder / "embedded")


def same(store: Store, expected: Manifest) -> None:
    assert json.loads(store.get("jobs/result.json")) == {"digest": expected.digest}
    found = curation.find(store, "fam", expected.digest)
    assert found is not None
    assert found.counts == expected.counts
    assert found.shards == expected.shards


def test_an_executor_that_is_lost_is_replaced_and_the_dataset_is_the_embedded_engines(
    place: Place, store: Store, tmp_path: Path
) -> None:
    expected = embedded(tmp_path, dedup={})
    running = start(place, store, recipe_of("operator", dedup={}), drop_of(store, files()))
    running.until(lambda _: len(place.pods("executor")) == 2 and running.splits())
    executors = place.pods("executor")
    place.kill(executors[0])
    running.until(lambda _: set(place.pods("executor")) - set(executors))
    seen = running.until(lambda seen: seen.phase is Phase.SUCCEEDED)
    assert seen.started is not None
    same(store, expected)
    assert not running.splits()  # nothing unfinished is left on the shared volume


def test_spark_submit_in_a_job_makes_the_embedded_engines_dataset(place: Place, store: Store, tmp_path: Path) -> None:
    expected = embedded(tmp_path)
    running = start(place, store, recipe_of("spark-submit"), drop_of(store, files()))
    executors: set[str] = set()

    def done(seen: Observation) -> bool:
        executors.update(place.pods("executor"))
        return seen.phase is Phase.SUCCEEDED

    running.until(done)
    assert len(executors) == 2
    same(store, expected)


@pytest.mark.skipif(bool(NO_IMAGE), reason=NO_IMAGE)
def test_pods_of_the_curation_image_make_it_too(place: Place, store: Store, tmp_path: Path) -> None:
    expected = embedded(tmp_path)
    image, _ = built("curation")
    # Nothing of this machine: its Python, Java and Spark are the image's.
    values = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "JAVA_TOOL_"))}
    place.core.replace_namespaced_secret(SECRET, NAMESPACE, {"metadata": {"name": SECRET}, "stringData": values})
    own = {"image": image, "entrypoint": [], "code": "/opt/dropforge", "run_as": 10001, "volumes": [WORK]}
    running = start(place, store, recipe_of("operator", cluster=own), drop_of(store, files()))
    running.until(lambda seen: seen.phase is Phase.SUCCEEDED)
    same(store, expected)


def test_after_a_killed_driver_the_next_goes_on_from_the_finished_splits(
    place: Place, store: Store, tmp_path: Path
) -> None:
    expected = embedded(tmp_path)
    recipe, drop = recipe_of("operator"), drop_of(store, files())
    running = start(place, store, recipe, drop)
    running.until(lambda _: running.splits())
    (driver,) = place.pods("driver")
    place.kill(driver)
    seen = running.until(lambda seen: seen.phase is Phase.FAILED)
    finished = running.splits()
    assert finished, seen
    wait("the end of the executors", lambda: not place.pods("executor"))
    running.backend.delete(running.name, NAMESPACE)
    wait("the end of the first try", lambda: running.backend.read(running.name, NAMESPACE) is None)
    again = start(place, store, recipe, drop)
    kept: dict[str, int] = {}

    def done(seen: Observation) -> bool:
        if splits := again.splits():
            kept.update(splits)
        return seen.phase is Phase.SUCCEEDED

    again.until(done)
    same(store, expected)
    assert finished.items() <= kept.items()


def test_bad_data_is_told_as_such(place: Place, store: Store) -> None:
    drop = drop_of(store, {"a.jsonl": b"{broken\n{again\n"})
    running = start(place, store, recipe_of("operator"), drop)
    seen = running.until(lambda seen: seen.phase is Phase.FAILED)
    assert (seen.reason, seen.replica, seen.exit_code) == (Reason.BAD_DATA, "driver", 11), seen
    assert "none of 2 rows can be used" in seen.message


@pytest.mark.parametrize("arch", ["arm64"])
@pytest.mark.parametrize("submit", ["operator", "spark-submit"])
def test_arm64_pods_are_accepted(place: Place, submit: str, arch: str) -> None:
    recipe = recipe_of(
        submit,
        cluster={
            "node_selector": {"kubernetes.io/arch": arch},
            "tolerations": [{"key": "arch", "effect": "NoSchedule"}],
        },
    )
    cluster = recipe.curation.spark.cluster
    assert cluster is not None
    made = manifest(CurationJob("fam", "0" * 32, 1, {}, "/shared/x", "r.json"), "s3://bucket/job.json", cluster)
    kind = kind_of(made)
    kind.require_valid(made)
    told = client.CustomObjectsApi().create_namespaced_custom_object(
        kind.group, kind.version, NAMESPACE, kind.plural, made, dry_run="All"
    )
    specs = kind.pod_specs(told)
    for number, spec in enumerate(specs):
        assert spec["nodeSelector"] == {"kubernetes.io/arch": arch}
        pod = {"metadata": {"name": f"arm-{number}"}, "spec": {**spec, "serviceAccountName": "default"}}
        taken = place.core.create_namespaced_pod(NAMESPACE, pod, dry_run="All")
        assert taken.spec.node_selector == {"kubernetes.io/arch": arch}
        assert any(item.key == "arch" for item in taken.spec.tolerations)
