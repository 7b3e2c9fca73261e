"""All example DAGs, each run once: on this machine, and on a real cluster with the shipped rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubeflow_training
import pytest
from kubeflow_training.jobs.kinds import TRAIN_JOB
from kubeflow_training.jobs.kinds.compile import training_runtime
from kubeflow_training.jobs.local import LocalCluster

from tests.kubeflow_training.rights import Rights, admin

EXAMPLES = Path(kubeflow_training.__file__).parent / "example_dags"
IMAGE = os.environ.get("KUBEFLOW_TRAINING_TEST_IMAGE", "test.local/shell:1")
RUNNER = Path(__file__).with_name("runner.py")
ON_THIS_MACHINE = (
    "example_pytorch_job",
    "example_pytorch_job_manifest",
    "example_pytorch_job_options",
    "example_pytorch_job_sensor",
    "example_pytorch_job_hook",
    "example_retry_by_cause",
    "example_job_reaper",
    "example_elastic",
)
ON_KUBERNETES = (
    "example_kubernetes",
    "example_pytorch_job_hold",
    "example_train_job",
    "example_indexed_job",
    "example_kueue",
    "example_async_hook",
)
RUNTIME = "whole-gangs"
KUEUE, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"


class Results:
    """What became of the runs.

    :param log: what Airflow and its tasks said.
    """

    def __init__(self, lines: list[dict[str, Any]], log: str) -> None:
        self.parsed = lines[0]
        self.runs: dict[str, dict[str, Any]] = {dag: run for line in lines[1:] for dag, run in line.items()}
        self.log = log

    def value(self, dag: str, task: str, key: str = "return_value") -> Any:
        return self.runs[dag]["tasks"][task]["xcoms"].get(key)


def run_examples(folder: Path, dags: dict[str, dict[str, Any]], **env: str) -> Results:
    """Run the DAGs in a process with a new Airflow, one after the other."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}
    airflow = {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "KUBEFLOW_TRAINING_HOME": str(folder / "cluster"),
        "NO_COLOR": "1",
    }
    log = folder / "examples.log"
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, str(RUNNER), json.dumps(dags)],
            env={**clean, **airflow, **env},
            stdout=subprocess.PIPE,
            stderr=file,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    return Results([json.loads(line) for line in done.stdout.splitlines()], log.read_text(errors="replace"))


@pytest.fixture(scope="session")
def on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("examples")
    size = {"KUBEFLOW_TRAINING_CPUS": "4", "KUBEFLOW_TRAINING_MEMORY_GB": "8", "KUBEFLOW_TRAINING_GPUS": "0"}
    command = [sys.executable, "-m", "kubeflow_training.jobs.local", str(folder / "cluster")]
    with (folder / "supervisor.log").open("wb") as log:
        supervisor = subprocess.Popen(command, env={**os.environ, **size}, stdout=log, stderr=log)
    try:
        until(LocalCluster(folder / "cluster").supervisor)
        yield run_examples(folder, {dag: {} for dag in ON_THIS_MACHINE})
    finally:
        supervisor.terminate()
        supervisor.wait(30)


@pytest.fixture(scope="session")
def on_kubernetes(tmp_path_factory: pytest.TempPathFactory, rights: Rights) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("examples-on-kubernetes")
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(rights.kubeconfig)}}
    conf = {"namespace": rights.namespace, "image": IMAGE}
    more = {
        "example_train_job": {"runtime": RUNTIME, "runtime_kind": "TrainingRuntime"},
        "example_kueue": {"queue": "examples"},
    }
    with what_an_administrator_installs(rights.namespace), released(rights.namespace, "example-pytorch-job-hold"):
        yield run_examples(
            folder,
            {dag: conf | more.get(dag, {}) for dag in ON_KUBERNETES},
            AIRFLOW_CONN_KUBERNETES_DEFAULT=json.dumps(connection),
        )


@contextmanager
def what_an_administrator_installs(namespace: str) -> Iterator[None]:
    """A runtime for TrainJobs, and a queue of Kueue."""
    from kubernetes import client

    custom = client.CustomObjectsApi(admin())
    runtime, name = training_runtime(RUNTIME, namespace), f"examples-{namespace}"
    custom.create_namespaced_custom_object(TRAIN_JOB.group, TRAIN_JOB.version, namespace, "trainingruntimes", runtime)
    resources = [{"name": key, "nominalQuota": value} for key, value in (("cpu", "10"), ("memory", "10Gi"))]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": resources}]}
    queue = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "resourceGroups": [group],
    }
    wide = {"resourceflavors": ("ResourceFlavor", {}), "clusterqueues": ("ClusterQueue", queue)}
    try:
        for plural, (kind, spec) in wide.items():
            body = {"apiVersion": f"{KUEUE}/{KUEUE_VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
            custom.create_cluster_custom_object(KUEUE, KUEUE_VERSION, plural, body)
        local = {"apiVersion": f"{KUEUE}/{KUEUE_VERSION}", "kind": "LocalQueue", "metadata": {"name": "examples"}}
        local["spec"] = {"clusterQueue": name}
        custom.create_namespaced_custom_object(KUEUE, KUEUE_VERSION, namespace, "localqueues", local)
        yield
    finally:
        for plural in reversed(wide):
            custom.delete_cluster_custom_object(KUEUE, KUEUE_VERSION, plural, name)


@contextmanager
def released(namespace: str, prefix: str) -> Iterator[None]:
    """Does what a person does to end a hold: touches the file in the first pod that runs."""
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException
    from kubernetes.stream import stream

    core, done = client.CoreV1Api(admin()), threading.Event()

    def release() -> None:
        while not done.wait(1):
            for pod in core.list_namespaced_pod(namespace).items:
                if pod.metadata.name.startswith(prefix) and pod.status.phase == "Running":
                    try:
                        stream(
                            client.CoreV1Api(admin()).connect_get_namespaced_pod_exec,
                            pod.metadata.name,
                            namespace,
                            container="pytorch",
                            command=["touch", "/tmp/release"],
                            stdout=True,
                            stderr=True,
                        )
                    except (ApiException, AttributeError):
                        continue  # it ended meanwhile; of some answers the client itself makes an AttributeError

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join(10)


def until(what: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
