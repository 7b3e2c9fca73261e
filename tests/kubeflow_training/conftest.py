"""A real local cluster per test: its supervisor is a process, its jobs are processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, Phase, observe

from tests.kubeflow_training.rights import PARTS, Rights

T = TypeVar("T")


class Cluster:
    """A local cluster with its supervisor, and short words for what tests do with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = LocalCluster(home)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cpus: float = 4, gpus: int = 0) -> None:
        env = {**os.environ, "KUBEFLOW_TRAINING_CPUS": str(cpus), "KUBEFLOW_TRAINING_MEMORY_GB": "8"}
        env["KUBEFLOW_TRAINING_GPUS"] = str(gpus)
        with (self.home.parent / "supervisor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kubeflow_training.jobs.local", str(self.home)],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.until(self.client.supervisor)

    def kill(self) -> None:
        """SIGKILL: the supervisor has no chance to do anything."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, as at the end of the stack."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def manifest(self, script: str, name: str = "job", **more: Any) -> dict[str, Any]:
        """A job whose pods run a Python script."""
        command = more.pop("command", ["python", "-c", script])
        values = {"image": "none", "cpus": 1, "memory_gb": 0.5, "grace_seconds": 5} | more
        return pytorch_job(name=name, command=command, **values)

    def submit(self, script: str, name: str = "job", **more: Any) -> Snapshot:
        return self.client.create(self.manifest(script, name, **more))

    def read(self, name: str = "job") -> Snapshot | None:
        return self.client.read(name, "default")

    def observe(self, name: str = "job") -> Observation:
        snapshot = self.read(name)
        return observe(snapshot.job, snapshot.pods, snapshot.events) if snapshot else observe(None)

    def wait(self, *phases: Phase, name: str = "job", seconds: float = 30) -> Observation:
        """The first observation in one of the phases."""
        return self.until(lambda: found if (found := self.observe(name)).phase in phases else None, seconds)

    def ended(self, name: str = "job") -> Observation:
        """The observation once the job and all of its pods have ended."""

        def look() -> Observation | None:
            found = self.observe(name)
            return found if found.ended and not found.pods_running else None

        return self.until(look)

    def log(self, name: str = "job", index: int = 0) -> list[str]:
        snapshot = self.read(name)
        assert snapshot
        return self.client.logs(snapshot.pods[index]).lines

    def until(self, what: Callable[[], T | None], seconds: float = 30) -> T:
        """The first true value of `what`."""
        end = time.monotonic() + seconds
        while not (value := what()):
            if time.monotonic() > end:
                log = self.home.parent / "supervisor.log"
                raise AssertionError(f"waited in vain; supervisor:\n{log.read_text() if log.exists() else '-'}")
            time.sleep(0.02)
        return value

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for snapshot in self.client.jobs():
                    metadata = snapshot.job["metadata"]
                    self.client.delete(metadata["name"], metadata["namespace"], grace_seconds=0)
                self.stop()
            self.process.kill()
            self.process.wait()


@pytest.fixture
def stopped_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A local cluster whose supervisor does not run yet."""
    cluster = Cluster(tmp_path / "cluster")
    yield cluster
    if cluster.process is not None and cluster.process.poll() is not None:
        # A test that killed the supervisor may have left pods; a new one ends them.
        cluster.start()
    cluster.close()


@pytest.fixture
def cluster(stopped_cluster: Cluster) -> Cluster:
    """A running local cluster of 4 cpus and 8 GB."""
    stopped_cluster.start()
    return stopped_cluster


# On a real cluster, with the rights that the package ships: never with those of an administrator.


@pytest.fixture(scope="session")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    """A namespace of this session, with an account that has all rights of `manifests/`."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    found = Rights(tmp_path_factory.mktemp("rights"), *PARTS)
    yield found
    found.close()


@pytest.fixture
def fewer_rights(tmp_path: Path) -> Iterator[Callable[..., Rights]]:
    """Makes namespaces whose account has `rbac.yaml` and the named parts only."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    made: list[Rights] = []

    def make(*parts: str) -> Rights:
        made.append(Rights(tmp_path, *parts))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture(scope="session")
def namespace(rights: Rights) -> str:
    """A namespace of this session on the real cluster, which is deleted after it."""
    return rights.namespace


@pytest.fixture(scope="session")
def restricted_kubeconfig(rights: Rights) -> Path:
    """A kubeconfig of that namespace with the rights that the package ships."""
    return rights.kubeconfig
