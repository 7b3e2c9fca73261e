"""A real Airflow with its own database and a local cluster, both shared by the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, observe

HERE = Path(__file__).parent


class Airflow:
    """One process that is scheduler, worker and triggerer by turns (see driver.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = LocalCluster(folder / "cluster")
        self.other_kubeconfig = folder / "other.kubeconfig"
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")},
            "AIRFLOW_HOME": str(folder / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(HERE / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
            "KUBEFLOW_TRAINING_HOME": str(folder / "cluster"),
            "KUBEFLOW_TRAINING_CPUS": "4",
            "KUBEFLOW_TRAINING_MEMORY_GB": "8",
            "NO_COLOR": "1",
        }
        self.process: subprocess.Popen[str] | None = None
        self.pid = 0  # of the fork that does the work
        self.answers: Any = None
        self._log_from = 0

    def start(self) -> None:
        read, write = os.pipe()
        with (self.folder / "airflow.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "driver.py"), str(write)],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[write],
            )
        os.close(write)
        self.answers = os.fdopen(read)
        self._meet()

    def _meet(self) -> None:
        """Wait until the process, or the next after a killed one, tells who it is."""
        for line in self.answers:
            if "pid" in (told := json.loads(line)):
                self.pid = told["pid"]
                return
        raise AssertionError((self.folder / "airflow.log").read_text()[-4000:])

    def end(self) -> None:
        """The next one starts from nothing, with `env` as it is then."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            os.kill(self.pid, signal.SIGKILL)

    def begin(self, do: str, **more: Any) -> None:
        """Send a request and do not wait for its answer."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        assert self.process
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        line = self.answers.readline()
        assert line, "the process is gone"
        answer = json.loads(line)
        assert "pid" not in answer, "the process is gone, and another came"
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def ask(self, do: str, **more: Any) -> Any:
        self.begin(do, **more)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._meet()

    def state_from_outside(self, dag: str, run: str, state: str | None) -> None:
        """What the API server does when a person marks a task, while the task runs."""
        with sqlite3.connect(self.folder / "airflow/airflow.db", timeout=30) as database:
            database.execute("update task_instance set state = ? where dag_id = ? and run_id = ?", (state, dag, run))

    def mark(self) -> None:
        """From here on `log` begins."""
        self._log_from = (self.folder / "airflow.log").stat().st_size

    def log(self) -> str:
        text = (self.folder / "airflow.log").read_bytes()[self._log_from :].decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def ranks(self) -> list[str]:
        """Lines of ranks in the log."""
        return [
            found[1].rstrip() for found in re.finditer(r"\] (\[(?:master|worker)-\d+\] .*?)\s+\[kubeflow", self.log())
        ]


class Run:
    """One DAG run with one job of its own."""

    def __init__(self, airflow: Airflow, dag: str, name: str, manifest: dict[str, Any], backend: str) -> None:
        self.airflow, self.dag, self.name, self.manifest = airflow, dag, name, manifest
        self.run = f"{dag}-{name}"
        airflow.ask("create", dag=dag, run=self.run, conf={"manifest": manifest, "backend": backend})
        airflow.mark()

    def attempt(self, task: str = "train") -> dict[str, Any]:
        found: dict[str, Any] = self.airflow.ask("attempt", dag=self.dag, run=self.run, task=task)
        return found

    def begin_attempt(self) -> None:
        self.airflow.begin("attempt", dag=self.dag, run=self.run)

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self.airflow.ask("look", dag=self.dag, run=self.run)
        return found

    def jobs(self) -> list[Snapshot]:
        """All gangs of the task that there are, oldest first; the first has the run's name, later ones their number."""
        names = {job.job["metadata"]["name"]: job for job in self.airflow.cluster.jobs("default")}
        return [names[name] for name in [self.name, *(f"{self.name}-g{n}" for n in range(2, 20))] if name in names]

    def job(self) -> Snapshot | None:
        """The newest gang."""
        return next(reversed(self.jobs()), None)

    def phase(self) -> Phase:
        job = self.job()
        return observe(job.job, job.pods, job.events).phase if job else Phase.LOST

    def until(self, what: Callable[[], Any], seconds: float = 150) -> Any:
        end = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < end, self.airflow.log()[-3000:]
            time.sleep(0.02)
        return value

    def trigger(self, **more: Any) -> dict[str, Any]:
        """Arguments of a trigger for this run's job."""
        job = self.job()
        assert job
        return {
            "name": self.name,
            "namespace": "default",
            "uid": job.uid,
            "backend": "local",
            "poll_interval": 0.1,
            **more,
        }


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Airflow]:
    airflow = Airflow(tmp_path_factory.mktemp("airflow-side"))
    if Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        path = str(request.getfixturevalue("restricted_kubeconfig"))
        connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": path}}
        airflow.env["AIRFLOW_CONN_KUBERNETES_DEFAULT"] = json.dumps(connection)
        # A test may write this file, to be another account, or to reach the cluster another way.
        connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(airflow.other_kubeconfig)}}
        airflow.env["AIRFLOW_CONN_KUBERNETES_OTHER"] = json.dumps(connection)
    migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(migrate, env=airflow.env, check=True, capture_output=True, timeout=120)
    command = [sys.executable, "-m", "kubeflow_training.jobs.local"]
    with (airflow.folder / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(command, env=airflow.env, stdout=log, stderr=log)
    yield airflow
    for job in airflow.cluster.jobs():
        airflow.cluster.delete(job.job["metadata"]["name"], "default", grace_seconds=0)
    airflow.end()
    supervisor.terminate()
    supervisor.wait(60)


@pytest.fixture(autouse=True)
def free_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves running would take the room of the next."""
    yield
    if "airflow" not in request.fixturenames:
        return
    cluster: LocalCluster = request.getfixturevalue("airflow").cluster

    def busy() -> list[str]:
        jobs = [item.job for item in cluster.jobs() if not observe(item.job, item.pods).ended or _running(item)]
        return [job["metadata"]["name"] for job in jobs]

    for name in busy():
        cluster.delete(name, "default", grace_seconds=0)
    end = time.monotonic() + 30
    while left := busy():
        assert time.monotonic() < end, f"{left} still run"
        time.sleep(0.02)


def _running(item: Snapshot) -> bool:
    return any(pod["status"].get("phase") == "Running" for pod in item.pods)


@pytest.fixture
def new_run(airflow: Airflow, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Makes a DAG run whose task runs a Python script as its job."""
    count = iter(range(100))

    def make(dag: str, script: str, backend: str = "local", **more: Any) -> Run:
        digest = format(hash(request.node.nodeid) & 0xFFFFFFFF, "x")
        name = f"job-{digest}-{next(count)}"
        values = {"cpus": 1, "memory_gb": 0.2, "grace_seconds": 2} | more
        command = ["python", "-c", script] if backend == "local" else ["/bin/sh", "-c", script]
        manifest = pytorch_job(name=name, image="test.local/shell:1", command=command, **values)
        return Run(airflow, dag, name, manifest, backend)

    return make
