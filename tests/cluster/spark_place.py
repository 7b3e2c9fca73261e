"""What Spark's pods need on a test cluster: account, secret, and claims on this machine's folders."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.e2e.harness import wait

REPOSITORY = Path(__file__).parents[2]
NAMESPACE = os.environ.get("DROPFORGE_TEST_SPARK_NAMESPACE", "default")
"""One that the Spark operator watches."""
SECRET = "dropforge-trainer"
WORK: dict[str, Any] = {"claim": "work", "path": "/shared", "read_only": False}
"""The volume of a recipe on which driver and executors meet."""
_APPLICATIONS = ("sparkoperator.k8s.io", "v1beta2", "sparkapplications")


def roots() -> list[str]:
    """Folders of this machine that pods mount for its Python, Java and Spark."""
    found = {sys.prefix, sys.base_prefix, str(REPOSITORY), "/usr", "/lib", "/lib64", "/bin", "/etc/alternatives"}
    found |= {"/etc/passwd"}  # Java asks who it is
    found |= {str(path) for path in Path("/etc").glob("java-*")}
    return [path for path in sorted(found) if not any(path.startswith(f"{other}/") for other in found)]


def section(submit: str, **more: Any) -> dict[str, Any]:
    """`curation.spark.cluster` of a recipe."""
    volumes = [{"claim": "machine", "path": path, "sub_path": str(Path(path).resolve())[1:]} for path in roots()]
    volumes.append(WORK)
    return {
        "submit": submit,
        "image": "test.local/shell:1",
        "namespace": NAMESPACE,
        "memory": "600m",
        "cpu_request": "100m",
        "run_as": 65534,  # one whom /etc/passwd knows, for Java
        "work_path": "/shared",
        "volumes": volumes,
        "entrypoint": ["sh", str(REPOSITORY / "images/spark/entrypoint.sh")],
        "code": str(REPOSITORY),
        **more,
    }


@dataclass
class Place:
    """A namespace with what Spark's pods need: account, secret, and claims on this machine's folders."""

    core: Any
    work: Path
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def applications(self) -> list[str]:
        """Names of the SparkApplications that Dropforge made."""
        group, version, plural = _APPLICATIONS
        found = client.CustomObjectsApi().list_namespaced_custom_object(
            group, version, NAMESPACE, plural, label_selector="dropforge/purpose=curate"
        )
        return [item["metadata"]["name"] for item in found["items"]]

    def claims(self) -> list[str]:
        """Those that are there still; pods hold them."""
        found = self.core.list_namespaced_persistent_volume_claim(NAMESPACE).items
        return [item.metadata.name for item in found if item.metadata.name in {"machine", "work"}]

    def add(self, documents: Iterable[dict[str, Any]]) -> None:
        """Accounts and their rights; an account of another namespace is there already."""
        rbac = client.RbacAuthorizationV1Api()
        for document in documents:
            name = document["metadata"]["name"]
            make, drop = {
                "ServiceAccount": (
                    self.core.create_namespaced_service_account,
                    self.core.delete_namespaced_service_account,
                ),
                "Role": (rbac.create_namespaced_role, rbac.delete_namespaced_role),
                "RoleBinding": (rbac.create_namespaced_role_binding, rbac.delete_namespaced_role_binding),
            }[document["kind"]]
            make(NAMESPACE, document)
            self.undo.append(lambda drop=drop, name=name: drop(name, NAMESPACE))  # type: ignore[misc]

    def give_secret(self, values: Mapping[str, str]) -> None:
        """Addresses and credentials, and where this machine's Python, Java and Spark are."""
        import pyspark

        java = Path(shutil.which("java") or "/usr/bin/java").resolve().parents[1]
        python = str(Path(sys.executable).absolute())
        more = {
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "JAVA_HOME": str(java),
            "PYSPARK_PYTHON": python,
            "PYSPARK_DRIVER_PYTHON": python,
            "PYTHONPATH": f"{REPOSITORY}:{Path(pyspark.__file__).parents[1]}",
            "OMP_NUM_THREADS": "1",
            "JAVA_TOOL_OPTIONS": os.environ["JAVA_TOOL_OPTIONS"],
            "PATH": f"{Path(python).parent}:/usr/bin:/bin",
        }
        self.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": SECRET}, "stringData": {**values, **more}})
        self.undo.append(lambda: self.core.delete_namespaced_secret(SECRET, NAMESPACE))

    def pods(self, role: str) -> list[str]:
        """Names of the drivers or executors that hold, or will hold, a place on a node and are not about to go.

        An executor that ended before its lost driver removed it stays as `Completed` until the application goes.
        """
        found = self.core.list_namespaced_pod(NAMESPACE, label_selector=f"spark-role={role}").items
        held = [item for item in found if item.status.phase in {"Pending", "Running"}]
        return [item.metadata.name for item in held if item.metadata.deletion_timestamp is None]

    def kill(self, pod: str) -> None:
        """The pod goes at once, as if its node had gone."""
        self.core.delete_namespaced_pod(pod, NAMESPACE, grace_period_seconds=0)


@contextmanager
def opened(node: Any, work: Path) -> Iterator[Place]:
    """The namespace with all of it, for a while.

    :param node: this machine, as the cluster knows it.
    """
    crds = client.ApiextensionsV1Api().list_custom_resource_definition().items
    if "sparkapplications.sparkoperator.k8s.io" not in {crd.metadata.name for crd in crds}:
        pytest.skip("the cluster has no Spark operator")
    made = Place(client.CoreV1Api(), work)
    work.mkdir()
    work.chmod(0o777)
    try:
        text = (REPOSITORY / "helm-values/spark-driver.yaml").read_text()
        made.add(yaml.safe_load_all(text.replace("NAMESPACE", NAMESPACE)))
        for claim, path, mode in (("machine", "/", "ReadOnlyMany"), ("work", str(work), "ReadWriteMany")):
            _claim(made, node.metadata.name, claim, path, mode)
        yield made
    finally:
        custom = client.CustomObjectsApi()
        for item in made.applications():
            custom.delete_namespaced_custom_object(*_APPLICATIONS[:2], NAMESPACE, _APPLICATIONS[2], item)
        for undo in reversed(made.undo):
            with suppress(client.ApiException):
                undo()
        wait("the end of the claims", lambda: not made.claims())


def _claim(place: Place, node: str, claim: str, path: str, mode: str) -> None:
    name, size = f"{claim}-{uuid.uuid4().hex[:8]}", {"storage": "1Gi"}
    expression = {"key": "metadata.name", "operator": "In", "values": [node]}
    spec = {
        "accessModes": [mode],
        "capacity": size,
        "claimRef": {"namespace": NAMESPACE, "name": claim},
        "hostPath": {"path": path},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchFields": [expression]}]}},
    }
    place.core.create_persistent_volume({"metadata": {"name": name}, "spec": spec})
    place.undo.append(lambda: place.core.delete_persistent_volume(name))
    wanted = {"accessModes": [mode], "storageClassName": "", "volumeName": name, "resources": {"requests": size}}
    place.core.create_namespaced_persistent_volume_claim(NAMESPACE, {"metadata": {"name": claim}, "spec": wanted})
    place.undo.append(lambda: place.core.delete_namespaced_persistent_volume_claim(claim, NAMESPACE))
