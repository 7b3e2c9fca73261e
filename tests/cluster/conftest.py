"""The whole pipeline with its training on a real Kubernetes cluster: the stack here, the pods there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from dropforge.client.upload import find_files
from dropforge.install.rights import ENFORCED
from dropforge.samples import write_sample
from dropforge.stack import control
from tests.cluster.spark_place import Place, section
from tests.cluster.spark_place import opened as opened_for_spark
from tests.e2e.harness import Stack
from tests.kubeflow_training.kueue_situations import QUEUE
from tests.kubeflow_training.rights import Rights

REPOSITORY = Path(__file__).parents[2]
IMAGE = os.environ.get("DROPFORGE_TEST_IMAGE", "")
"""An image with the trainer; without one, pods mount this machine's Python, where this machine is a node."""


@dataclass(frozen=True)
class Namespace:
    """A namespace of this test's own, with what training pods need there.

    :param core, custom: clients of KUBECONFIG's own account, with which the test looks and disturbs.
    :param kubeconfig: of the account that has the shipped Role; the stack knows no other.
    """

    name: str
    core: Any
    custom: Any
    kubeconfig: Path

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.custom.list_namespaced_custom_object(
            "kubeflow.org", "v1", self.name, "pytorchjobs"
        )["items"]
        return found

    def running(self) -> list[str]:
        """Names of the pods that run."""
        pods = self.core.list_namespaced_pod(self.name, field_selector="status.phase=Running").items
        return sorted(pod.metadata.name for pod in pods)

    def kill(self, pod: str) -> None:
        """The pod goes at once, as if its node had gone."""
        self.core.delete_namespaced_pod(pod, self.name, grace_period_seconds=0)


def kubectl(*words: str, feed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=feed, capture_output=True, text=True)


@pytest.fixture(scope="session")
def machine_node() -> Any:
    """The cluster's node that is this machine."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    config.load_kube_config()
    identity = Path("/etc/machine-id")
    mine = identity.read_text().strip() if identity.is_file() else ""
    for node in client.CoreV1Api().list_node().items:
        if mine and node.status.node_info.machine_id == mine:
            return node
    pytest.skip("this machine is no node of the cluster: its pods could neither reach the stack nor mount its Python")


@pytest.fixture(scope="session")
def namespace(machine_node: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """With a claim `machine` on this machine's root, read-only."""
    with opened(machine_node, tmp_path_factory.mktemp("rights"), machine="/") as made:
        yield made


@contextmanager
def opened(machine_node: Any, folder: Path, *parts: str, **claims: str) -> Iterator[Namespace]:
    """A namespace for a while.

    :param folder: for its kubeconfig. :param parts: of the shipped rights, beside `rbac.yaml`.
    :param claims: folders of this machine that it has claims on, by name of the claim.
    """
    rights = Rights(folder, *parts)
    name, core = rights.namespace, client.CoreV1Api()
    # Not "restricted": the training operator's own init container of workers says nothing of its rights.
    core.patch_namespace(name, {"metadata": {"labels": {ENFORCED: "baseline"}}})
    try:
        with claimed(name, machine_node, **claims):
            yield Namespace(name, core, client.CustomObjectsApi(), rights.kubeconfig)
    finally:
        rights.close()


@contextmanager
def claimed(name: str, machine_node: Any, **claims: str) -> Iterator[None]:
    """A namespace has claims on folders of this machine; all but that on its root may be written to."""
    core, size = client.CoreV1Api(), {"storage": "1Gi"}
    node = {"key": "metadata.name", "operator": "In", "values": [machine_node.metadata.name]}
    for claim, path in claims.items():
        modes = ["ReadOnlyMany" if path == "/" else "ReadWriteMany"]
        if path != "/":
            Path(path).mkdir(exist_ok=True)
            Path(path).chmod(0o777)
        volume = {
            "accessModes": modes,
            "capacity": size,
            "claimRef": {"namespace": name, "name": claim},
            "hostPath": {"path": path},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchFields": [node]}]}},
        }
        core.create_persistent_volume({"metadata": {"name": f"{name}-{claim}"}, "spec": volume})
        spec = {
            "accessModes": modes,
            "storageClassName": "",
            "volumeName": f"{name}-{claim}",
            "resources": {"requests": size},
        }
        core.create_namespaced_persistent_volume_claim(name, {"metadata": {"name": claim}, "spec": spec})
    try:
        yield
    finally:
        for claim in claims:
            core.delete_persistent_volume(f"{name}-{claim}")


@pytest.fixture
def place(machine_node: Any, tmp_path: Path) -> Iterator[Place]:
    """Where Spark's pods can work."""
    pytest.importorskip("pyspark")
    with opened_for_spark(machine_node, tmp_path / "work") as made:
        yield made


@pytest.fixture(scope="session")
def presets(tmp_path_factory: pytest.TempPathFactory, namespace: Namespace) -> Path:
    """The presets of a team on this cluster."""
    presets = tmp_path_factory.mktemp("presets")
    (presets / "cluster.yaml").write_text(yaml.safe_dump(preset(namespace.name)))
    by_spark: dict[str, Any] = {"extends": "cluster", "train": {"max_steps": 6}}
    by_spark["curation"] = {"engine": "spark", "spark": {"cluster": section("operator")}}
    (presets / "by-spark.yaml").write_text(yaml.safe_dump(by_spark))
    queued = {"extends": "cluster", "compute": {"nodes": 1, "queue": QUEUE}}
    (presets / "queued.yaml").write_text(yaml.safe_dump(queued))
    return presets


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, machine_node: Any, namespace: Namespace, presets: Path
) -> Iterator[Stack]:
    """A stack whose pods run on the cluster, because its default preset says so; nothing else is told to it."""
    folder = tmp_path_factory.mktemp("stack")
    with started(folder, machine_node, namespace, presets, "cluster", where_python_is()) as made:
        yield made


@contextmanager
def started(
    folder: Path, machine_node: Any, namespace: Namespace, presets: Path, default: str, environment: dict[str, str]
) -> Iterator[Stack]:
    """A stack with the namespace's account, whose pods have its secret, as by `dropforge secret | kubectl apply -f -`.

    :param folder: an empty one. :param default: name of the preset. :param environment: of the pods, beside the secret.
    """
    pod_host = next(item.address for item in machine_node.status.addresses if item.type == "InternalIP")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DROPFORGE_PRESETS", str(presets))
        patch.setenv("DROPFORGE_PRESET", default)
        patch.setenv("KUBECONFIG", str(namespace.kubeconfig))
        control.start(folder, pod_host=pod_host)
    try:
        control.wait_ready(folder)
        made = secret(folder, namespace.name)
        made["stringData"] |= environment
        namespace.core.create_namespaced_secret(namespace.name, made)
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("AWS_", "MLFLOW_", "DROPFORGE_"))]:
                patch.delenv(name)
            yield Stack(folder)
    finally:
        control.stop(folder)


def preset(namespace: str) -> dict[str, Any]:
    """Two pods that meet over gloo."""
    compute: dict[str, Any] = {"backend": "kubernetes", "namespace": namespace, "nodes": 2, "cpus": 0.5}
    compute |= {"memory_gb": 2, "processes_per_node": 1, "image": IMAGE or "test.local/shell:1"}
    if not IMAGE:
        roots = {sys.prefix, sys.base_prefix, str(REPOSITORY), "/usr", "/lib", "/lib64", "/bin"}
        compute["volumes"] = [
            {"claim": "machine", "path": path, "sub_path": str(Path(path).resolve()).lstrip("/")}
            for path in sorted(roots)
            if Path(path).exists() and not any(path.startswith(f"{other}/") for other in roots)
        ]
    train = {"max_steps": 40, "checkpoint_every": 5}
    return {"extends": "tiny", "train": train, "compute": compute, "evaluate": {"max_rows": 40}}


def where_python_is() -> dict[str, str]:
    """What pods without an image have to know of this machine."""
    return {} if IMAGE else {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}


def secret(folder: Path, namespace: str) -> dict[str, Any]:
    """What `dropforge secret` prints."""
    command = [str(Path(sys.executable).parent / "dropforge"), "secret", "--state", str(folder)]
    done = subprocess.run([*command, "--namespace", namespace], capture_output=True, text=True, check=True)
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of a sample drop."""
    return find_files(list(write_sample(tmp_path_factory.mktemp("sample"), part=1)))
