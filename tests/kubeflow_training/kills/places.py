"""Where the jobs run: this machine's local cluster, or BusyBox pods and pretend nodes of a real one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.backend import Backend, Snapshot
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, observe

from tests.kubeflow_training.kills.installation import until
from tests.kubeflow_training.rights import Rights, admin
from tests.kubeflow_training.situations import IMAGE, PRETEND

# Counts lines until it is released; the last line tells how many there were.
SCRIPT = """trap 'exit 143' TERM
n=0
while [ ! -e {go} ]; do echo "line $n"; n=$((n+1)); sleep 0.1; done
echo "that was $n"
"""


class Place(ABC):
    """One backend, and short words for what tests do with it."""

    kind: str
    namespace: str
    backend: Backend

    @abstractmethod
    def manifest(self, name: str) -> dict[str, Any]:
        """A job that runs until it is released."""

    @abstractmethod
    def too_large(self, name: str) -> dict[str, Any]:
        """A job that waits for room."""

    @abstractmethod
    def slow(self, name: str) -> dict[str, Any]:
        """A job whose pods take long to start, where there is such a thing."""

    @abstractmethod
    def release(self, name: str) -> None: ...

    def gangs(self, name: str) -> list[Snapshot]:
        """The gangs of a job that there are, those that are being deleted left out; oldest first."""
        found = {item.job["metadata"]["name"]: item for item in self.backend.jobs(self.namespace)}
        names = [name, *(f"{name}-g{n}" for n in range(2, 9))]
        kept = [found[key] for key in names if key in found]
        return [item for item in kept if not item.job["metadata"].get("deletionTimestamp")]

    def observe(self, gang: Snapshot) -> Observation:
        now = self.backend.read(gang.job["metadata"]["name"], self.namespace)
        return observe(now.job, now.pods, now.events) if now else observe(None)

    def pods(self, name: str) -> list[Any]:
        found = [self.backend.read(gang.job["metadata"]["name"], self.namespace) for gang in self.gangs(name)]
        return [pod for gang in found if gang for pod in gang.pods]

    @abstractmethod
    def close(self) -> None: ...


class OnThisMachine(Place):
    kind, namespace = "local", "default"

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.backend = folder, LocalCluster(folder / "cluster")
        command = [sys.executable, "-m", "kubeflow_training.jobs.local", str(folder / "cluster")]
        size = {"KUBEFLOW_TRAINING_CPUS": "100", "KUBEFLOW_TRAINING_MEMORY_GB": "100"}
        with (folder / "supervisor.log").open("wb") as log:
            self._process = subprocess.Popen(command, env=env | size, stdout=log, stderr=log, start_new_session=True)
        until(self.backend.supervisor)
        self._blocked = False

    def manifest(self, name: str, **more: Any) -> dict[str, Any]:
        script = SCRIPT.format(go=self._go(name))
        values = {"cpus": 1, "memory_gb": 0.1, "grace_seconds": 2} | more
        return pytorch_job(name=name, image="none", command=["/bin/sh", "-c", script], **values)

    def too_large(self, name: str) -> dict[str, Any]:
        if not self._blocked:
            # First come, first served: nothing that comes later runs before a job that does not fit now.
            self.backend.create(self.manifest("large", memory_gb=80))
            self._blocked = True
        return self.manifest(name, memory_gb=40)

    def slow(self, name: str) -> dict[str, Any]:
        return self.manifest(name)

    def release(self, name: str) -> None:
        self._go(name).touch()

    def _go(self, name: str) -> Path:
        return self.folder / f"go-{name}"

    def close(self) -> None:
        for item in self.backend.jobs():
            self.backend.delete(item.job["metadata"]["name"], self.namespace, grace_seconds=0)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()


class OnKubernetes(Place):
    kind = "kubernetes"

    def __init__(self, rights: Rights) -> None:
        from kubeflow_training.jobs.kubernetes import KubernetesCluster
        from kubernetes import client

        self.namespace = rights.namespace
        self.backend = KubernetesCluster(rights.client())
        self._core = client.CoreV1Api(admin())  # releasing jobs is no right of ours
        until(lambda: any(item.metadata.name == "default" for item in self._accounts()))

    def _accounts(self) -> Sequence[Any]:
        found: Sequence[Any] = self._core.list_namespaced_service_account(self.namespace).items
        return found

    def manifest(self, name: str, **more: Any) -> dict[str, Any]:
        values = {"cpus": 0.01, "memory_gb": 0.02, "grace_seconds": 2, "image_pull_policy": "IfNotPresent"} | more
        command = ["/bin/sh", "-c", SCRIPT.format(go="/go")]
        return pytorch_job(name=name, namespace=self.namespace, image=IMAGE, command=command, **values)

    def timed(self, name: str) -> dict[str, Any]:
        """A job that ends by itself, after 30 seconds."""
        found = self.manifest(name)
        for replica in found["spec"]["pytorchReplicaSpecs"].values():
            (container,) = replica["template"]["spec"]["containers"]
            container["command"] = ["/bin/sh", "-c", "(sleep 30; touch /go) & " + SCRIPT.format(go="/go")]
        return found

    def too_large(self, name: str) -> dict[str, Any]:
        return self.manifest(name, cpus=5000)

    def slow(self, name: str) -> dict[str, Any]:
        found = self.manifest(name, **PRETEND)
        for replica in found["spec"]["pytorchReplicaSpecs"].values():
            notes = replica["template"].setdefault("metadata", {}).setdefault("annotations", {})
            notes["test.local/starts-after"] = "600s"
        return found

    def release(self, name: str) -> None:
        from kubernetes.stream import stream

        pods = self.pods(name)
        assert pods
        for pod in pods:
            where = (pod["metadata"]["name"], self.namespace)
            core = type(self._core)(admin())  # a client that has streamed can do nothing else
            how = {"container": "pytorch", "command": ["touch", "/go"], "stdout": True, "stderr": True}
            assert not (said := stream(core.connect_get_namespaced_pod_exec, *where, **how)), said

    def close(self) -> None:
        """The namespace goes with the rights."""


def connection(rights: Rights) -> dict[str, str]:
    """The environment that makes Airflow's connection to the cluster."""
    value = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(rights.kubeconfig)}}
    return {"AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(value)}
