"""The task `curate` as a job of a real cluster: a retry goes on with the job that is there, and tells its dataset."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from dropforge_airflow.operators import CurateOperator
from dropforge_airflow.tasks.data import cluster_job

import curation
from dropforge import layout, ledger
from dropforge.drop import read_drop
from dropforge.recipes import load_recipe
from tests.dropforge_airflow.conftest import Yard

GROUP = ("sparkoperator.k8s.io", "v1beta2")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path(os.environ.get("KUBECONFIG", "/none")).is_file(), reason="KUBECONFIG names no cluster"),
]


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One that no Spark operator watches: what becomes of an application is the test's to say."""
    from kubernetes import client, config

    config.load_kube_config()
    core, name = client.CoreV1Api(), f"curate-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": os.environ["KUBECONFIG"]}}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(connection))
    monkeypatch.setenv("KUBEFLOW_TRAINING_INSTANCE", "test")
    yield name
    core.delete_namespace(name)


class Store(dict[str, Any]):
    """The task state store."""

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        self[key] = json.loads(json.dumps(value))


def context(store: Store, number: int) -> Any:
    ti = SimpleNamespace(
        dag_id="d",
        run_id="r",
        task_id="curate",
        map_index=-1,
        try_number=number,
        max_tries=3,
        xcom_push=lambda **_: None,
    )
    return {"ti": ti, "task_state_store": store, "dag_run": SimpleNamespace(clear_number=0)}


def tried(planned: Any, store: Store, number: int) -> tuple[CurateOperator, TaskDeferred]:
    """A try in a worker of its own, up to the triggerer."""
    task = CurateOperator(task_id="curate", planned=planned, retries=3, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context(store, number))
    return task, deferred.value


def test_a_retry_finds_its_curation_and_tells_its_dataset(yard: Yard, namespace: str, tmp_path: Path) -> None:
    from kubernetes import client

    rows = b"\n".join(json.dumps({"text": f"row {n} of a drop"}).encode() for n in range(40))
    yard.upload("fam", "d1", rows.decode())
    drop = read_drop(yard.store, "fam", "d1", yard.bucket)
    ledger.record(yard.store, drop)
    volume = {"claim": "work", "path": "/work", "read_only": False}
    cluster = {"image": "registry.example/curation:1", "namespace": namespace, "volumes": [volume]}
    asked = {"curation": {"engine": "spark", "spark": {"cluster": cluster}}}
    planned: Any = {"family": "fam", "drop_id": drop.id, "counter": 1, "recipe": load_recipe("tiny", asked).plain()}
    memory = Store()
    _, first = tried(planned, memory, 1)
    objects = client.CustomObjectsApi()

    def applications() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = objects.list_namespaced_custom_object(*GROUP, namespace, "sparkapplications")[
            "items"
        ]
        return found

    (one,) = applications()
    task, second = tried(planned, memory, 2)
    assert [item["metadata"]["uid"] for item in applications()] == [one["metadata"]["uid"]]
    told = [deferred.trigger.serialize()[1] for deferred in (first, second)]
    assert {item["uid"] for item in told} == {one["metadata"]["uid"]}
    # The driver's work, done here.
    made = curation.curate(yard.store, drop, load_recipe("tiny", {"curation": {"workers": 1}}), workdir=tmp_path)
    spec = one["spec"]["arguments"][0].removeprefix(f"s3://{yard.bucket}/")
    yard.store.put(json.loads(yard.store.get(spec))["result"], json.dumps({"digest": made.digest}).encode())
    name = one["metadata"]["name"]
    state = {"status": {"applicationState": {"state": "COMPLETED"}, "driverInfo": {}}}
    objects.patch_namespaced_custom_object_status(*GROUP, namespace, "sparkapplications", name, state)
    seen = {"phase": "succeeded", "reason": None, "message": ""}
    event = {"kind": "ended", "job": memory["pytorch_job"], "observation": seen}
    assert yard.store.stat(layout.proven_key("fam", drop.id)) is None
    assert task.resume(context(memory, 2), event)["digest"] == made.digest
    assert yard.store.stat(layout.proven_key("fam", drop.id)) is not None
    # Airflow may end the try that was just resumed: the next one has no trigger, and no other application.
    late = CurateOperator(task_id="curate", planned=planned, retries=3, deferrable=True)
    assert late.execute(context(memory, 3))["digest"] == made.digest
    assert [item["metadata"]["uid"] for item in applications()] == [one["metadata"]["uid"]]
    # Another plan is another job, and never the running one.
    other = cluster_job({**planned, "counter": 2})
    assert other is not None
    assert other["metadata"]["name"] != name
