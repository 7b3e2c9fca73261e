"""The two places where jobs run, behind the same few words: what a `Backend` promises must hold on both.

The local cluster is always there. Kubernetes needs KUBECONFIG, the training operator, and an image with a shell, which
is not pulled: `KUBEFLOW_TRAINING_TEST_IMAGE`, `test.local/shell:1` unless set. Tests make and remove a namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kubeflow_training.jobs.backend import Backend, Snapshot
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, Phase, observe

from tests.kubeflow_training.rights import PARTS, Rights, admin

T = TypeVar("T")
IMAGE = os.environ.get("KUBEFLOW_TRAINING_TEST_IMAGE", "test.local/shell:1")
CPUS, MEMORY_GB, GPUS = 4, 8, 4  # of the small machine that jobs wait for


class Place(ABC):
    """One backend, and short words for what tests do with it."""

    kind: str
    backend: Backend
    namespace: str
    pause = 0.05

    @abstractmethod
    def connect(self) -> Backend:
        """A new client, as another process would have it."""

    def everywhere(self) -> Backend:
        """A client that may look into every namespace."""
        return self.backend

    def on_small_machine(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The manifest for a machine of `CPUS`, `MEMORY_GB` and `GPUS` that nobody else uses."""
        return manifest

    def with_python(self, manifest: dict[str, Any], *folders: Path) -> dict[str, Any]:
        """The manifest with this machine's Python and these folders in its pods, the first one for writing too."""
        return manifest

    @abstractmethod
    def lose(self, job: Job, index: int) -> None:
        """One pod is gone without a word."""

    def manifest(self, script: str, **more: Any) -> dict[str, Any]:
        """A job whose pods run a shell script."""
        values = {"cpus": 0.05, "memory_gb": 0.05, "grace_seconds": 5, "name": f"job-{uuid.uuid4().hex[:8]}"} | more
        command = values.pop("command", ["/bin/sh", "-c", script])
        return pytorch_job(
            image=IMAGE,
            image_pull_policy="IfNotPresent",
            command=command,
            namespace=self.namespace,
            spread="any",
            **values,
        )

    def submit(self, script: str, **more: Any) -> Job:
        return self.create(self.manifest(script, **more))

    def create(self, manifest: Mapping[str, Any]) -> Job:
        return Job(self, self.backend.create(manifest), manifest)

    def until(self, what: Callable[[], T | None], seconds: float = 150) -> T:
        """The first true value of `what`."""
        end = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(self.pause)
        return value

    def clear(self) -> None:
        """Remove all jobs."""

        def none_left() -> bool:
            left = self.backend.jobs(self.namespace)
            for snapshot in left:
                if not snapshot.job["metadata"].get("deletionTimestamp"):
                    self.backend.delete(snapshot.job["metadata"]["name"], self.namespace, grace_seconds=0)
            return not left

        self.until(none_left)


class Job:
    """A job that a test created."""

    def __init__(self, place: Place, created: Snapshot, manifest: Mapping[str, Any]) -> None:
        self.place, self.backend, self.created, self.manifest = place, place.backend, created, manifest
        self.name, self.namespace, self.uid = manifest["metadata"]["name"], place.namespace, created.uid

    def read(self) -> Snapshot | None:
        return self.backend.read(self.name, self.namespace)

    def pods(self) -> list[Mapping[str, Any]]:
        snapshot = self.read()
        return list(snapshot.pods) if snapshot else []

    def observe(self) -> Observation:
        snapshot = self.read()
        return observe(snapshot.job, snapshot.pods, snapshot.events) if snapshot else observe(None)

    def wait(self, *phases: Phase, seconds: float = 150) -> Observation:
        """The first observation in one of the phases."""
        last: list[Observation] = []

        def look() -> Observation | None:
            last[:] = [self.observe()]
            return last[0] if last[0].phase in phases else None

        try:
            return self.place.until(look, seconds)
        except AssertionError:
            raise AssertionError(f"waited in vain for {phases}; last: {last}") from None

    def ended(self, seconds: float = 150) -> Observation:
        """The observation once the job and its pods have ended."""

        def look() -> Observation | None:
            found = self.observe()
            return found if found.ended and not found.pods_running else None

        return self.place.until(look, seconds)

    def gone(self, seconds: float = 60) -> None:
        self.place.until(lambda: self.read() is None, seconds)

    def delete(self, **how: Any) -> bool:
        return self.backend.delete(self.name, self.namespace, **how)

    def log(self, index: int = 0) -> list[str]:
        """Every line so far of the pod's log."""
        pod, lines, position = self.pods()[index], [], None
        while (chunk := self.backend.logs(pod, position)).lines:
            lines, position = lines + chunk.lines, chunk.position
        return lines

    def terminated(self, index: int = 0) -> Mapping[str, Any] | None:
        """How the pod's container ended, once it has."""
        statuses = self.pods()[index]["status"].get("containerStatuses") or [{}]
        found: Mapping[str, Any] | None = statuses[0].get("state", {}).get("terminated")
        return found


class OnThisMachine(Place):
    kind = "local"

    def __init__(self, home: Path, namespace: str) -> None:
        self.home, self.namespace, self.backend = home, namespace, LocalCluster(home)
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self) -> Backend:
        return LocalCluster(self.home)

    def start(self) -> None:
        env = {
            **os.environ,
            "KUBEFLOW_TRAINING_CPUS": str(CPUS),
            "KUBEFLOW_TRAINING_MEMORY_GB": str(MEMORY_GB),
            "KUBEFLOW_TRAINING_GPUS": str(GPUS),
        }
        with (self.home.parent / "supervisor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kubeflow_training.jobs.local", str(self.home)],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.until(LocalCluster(self.home).supervisor)

    def lose(self, job: Job, index: int) -> None:
        name = job.pods()[index]["metadata"]["name"]
        status = self.home / "jobs" / self.namespace / job.name / "pods" / name / "status.json"
        os.kill(json.loads(status.read_text())["session"], signal.SIGKILL)

    def stop(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()


class OnKubernetes(Place):
    kind = "kubernetes"
    pause = 0.25

    def __init__(self, rights: Rights) -> None:
        from kubernetes import client

        self.rights, self.namespace, self.machine = rights, rights.namespace, ""
        # An administrator makes nodes and loses pods; the jobs are handled with the shipped rights alone.
        self.core = client.CoreV1Api(admin())
        self.custom = client.CustomObjectsApi(self.core.api_client)
        self.backend = self.connect()

    def connect(self) -> Backend:
        from kubeflow_training.jobs.kubernetes import KubernetesCluster

        return KubernetesCluster(self.rights.client())

    def everywhere(self) -> Backend:
        from kubeflow_training.jobs.kubernetes import KubernetesCluster

        return KubernetesCluster(admin())

    def start(self) -> None:
        from kubernetes.client.exceptions import ApiException

        def account() -> bool:
            with contextlib.suppress(ApiException):
                return bool(self.core.read_namespaced_service_account("default", self.namespace))
            return False

        self.until(account)

    def on_small_machine(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if not self.machine:
            self.machine = self._make_machine()
        for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
            pod = replica["template"]["spec"]
            pod.pop("initContainers", None)
            pod["nodeSelector"] = {"kubernetes.io/hostname": self.machine}
            pod["tolerations"] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
        return manifest

    def with_python(self, manifest: dict[str, Any], *folders: Path) -> dict[str, Any]:
        roots = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", *map(str, folders)}
        for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
            pod = replica["template"]["spec"]
            container = pod["containers"][0]
            for number, root in enumerate(sorted(roots)):
                pod["volumes"].append({"name": f"root-{number}", "hostPath": {"path": str(Path(root).resolve())}})
                mount = {"name": f"root-{number}", "mountPath": root, "readOnly": root != str(folders[0])}
                container["volumeMounts"].append(mount)
            container["resources"] = {"requests": {"cpu": "10m", "memory": "50M"}}
            pod["nodeName"] = self._this_machine()
        return manifest

    def _this_machine(self) -> str:
        """The node whose folders are ours."""
        identity = Path("/etc/machine-id")
        for node in self.core.list_node().items:
            if identity.is_file() and node.status.node_info.machine_id == identity.read_text().strip():
                return str(node.metadata.name)
        pytest.skip("this machine is no node of the cluster: pods cannot mount its Python")

    def lose(self, job: Job, index: int) -> None:
        name = job.pods()[index]["metadata"]["name"]
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def _make_machine(self) -> str:
        """A pretend node of our own; needs KWOK."""
        if not self.core.list_node(label_selector="type=kwok").items:
            pytest.skip("the cluster has no pretend nodes (KWOK)")
        size = {"cpu": str(CPUS), "memory": f"{MEMORY_GB}G", "nvidia.com/gpu": str(GPUS), "pods": "110"}
        name = f"machine-{self.namespace}"
        self.core.create_node(
            {
                "metadata": {
                    "name": name,
                    "labels": {"kubernetes.io/hostname": name},
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                },
                "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
                "status": {"capacity": size, "allocatable": size},
            }
        )
        return name

    def stop(self) -> None:
        if self.machine:
            self.core.delete_node(self.machine)
        self.rights.close()


@pytest.fixture(scope="session")
def on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnThisMachine]:
    place = OnThisMachine(tmp_path_factory.mktemp("contract") / "cluster", "contract")
    place.start()
    yield place
    with contextlib.suppress(AssertionError):
        place.clear()
    place.stop()


@pytest.fixture(scope="session")
def on_kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnKubernetes]:
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    place = OnKubernetes(Rights(tmp_path_factory.mktemp("contract-rights"), *PARTS))
    place.start()
    yield place
    place.stop()


BOTH = ["on_this_machine", pytest.param("on_kubernetes", marks=pytest.mark.cluster)]


@pytest.fixture(scope="session", params=BOTH, ids=["local", "kubernetes"])
def shared_place(request: pytest.FixtureRequest) -> Place:
    """Both places, for jobs that several tests look at."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """Both places; what the test leaves is removed."""
    before = {snapshot.uid for snapshot in shared_place.backend.jobs(shared_place.namespace)}
    yield shared_place
    for snapshot in shared_place.backend.jobs(shared_place.namespace):
        if snapshot.uid not in before:
            metadata = snapshot.job["metadata"]
            shared_place.backend.delete(metadata["name"], shared_place.namespace, uid=snapshot.uid, grace_seconds=0)
