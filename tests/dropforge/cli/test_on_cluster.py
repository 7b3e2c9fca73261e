"""`queue` and `shell` on jobs of a real cluster, with the rights of a person and no others."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kubernetes.standing import Standings
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.observation import Phase, kueue

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.run import RunSpec
from dropforge.stages import STAGES
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal
from tests.e2e.harness import wait
from tests.kubeflow_training.kueue_situations import GANG, QUEUE, queue
from tests.kubeflow_training.rights import Rights, admin
from tests.kubeflow_training.situations import PRETEND, SLEEP, Job, Stage

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path(os.environ.get("KUBECONFIG", "/none")).is_file(), reason="KUBECONFIG names no cluster"),
]

ADMIN = Path(os.environ.get("KUBECONFIG", "/none"))
ROLE = Path(__file__).parents[3] / "helm-values/terminal.yaml"
OPENED = ("success",) * STAGES.index("train")


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    """A namespace in which Airflow's account makes jobs."""
    found = Rights(tmp_path_factory.mktemp("rights"), "events", "kueue", "short-grace")
    yield found
    found.close()


@pytest.fixture(scope="module")
def stage(rights: Rights) -> Iterator[Stage]:
    """That namespace, with a queue that has room for one pretend gang."""
    found = Stage(admin(), rights.namespace, rights.client())
    queue(found, preemption="Never")
    yield found
    found.close()


@pytest.fixture(scope="module")
def person(rights: Rights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig of somebody at a terminal."""
    return rights.person(tmp_path_factory.mktemp("person") / "kubeconfig", ROLE)


def as_of(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have these rights; in this process the client has read its environment long ago."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))


class Runs:
    """Runs that are opened in MLflow and have a job on the cluster, as the tasks of the DAG leave them."""

    def __init__(self, stage: Stage, mlflow: str, airflow: FakeAirflow) -> None:
        self.stage, self.mlflow, self.airflow = stage, mlflow, airflow

    def train(self, name: str, script: str = SLEEP, **job: Any) -> Job:
        dag_run = f"manual__{name}"
        params = {"compute.backend": "kubernetes", "compute.namespace": self.stage.namespace}
        spec = RunSpec(name, "work", 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
        tracking.open_run(self.mlflow, spec, params, {tracking.TAG_DAG_RUN: dag_run})
        self.airflow.add(DagRun(dag_run, "running", (*OPENED, "deferred")))
        owner = Owner(FINETUNE, dag_run, "train")
        labels = {**owner.labels("1", 1), "dropforge/purpose": "train"}
        return self.stage.submit(script, labels=labels, annotations=owner.annotations("1", 1), **job)

    def end(self, job: Job) -> None:
        self.stage.backends[job.kind.name].delete(job.name, self.stage.namespace, grace_seconds=0)


@pytest.fixture
def runs(
    stage: Stage,
    mlflow_server: str,
    airflow: FakeAirflow,
    terminal: Terminal,
    person: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runs]:
    as_of(person, monkeypatch)
    yield Runs(stage, mlflow_server, airflow)
    stage.clear()


def test_jobs_in_a_queue_of_the_cluster_are_listed_held_released_and_moved(runs: Runs, terminal: Terminal) -> None:
    def listed() -> dict[str, dict[str, Any]]:
        return {item["run"]: item for item in json.loads(terminal("queue", "--json").stdout)}

    def places() -> dict[str, int | None]:
        return {name: item["position"] for name, item in listed().items()}

    def told(*words: str) -> str:
        done = terminal("queue", *words)
        assert done.exit_code == 0, done.exception
        return done.output

    first = runs.train("kueue-1", **GANG)
    first.running()
    mlflow = tracking.client(runs.mlflow)
    (tracked,) = tracking.search(mlflow, tracking.TAG_DAG_RUN, "manual__kueue-1")
    mlflow.log_metric(tracked.info.run_id, "train/eta_seconds", 600.0)
    second = runs.train("kueue-2", **GANG)
    second.until(lambda seen: seen.position == 1)
    time.sleep(1.0)  # Kueue orders by whole seconds
    third = runs.train("kueue-3", **GANG)
    wait("the order of the queue", lambda: places() == {"kueue-2": 1, "kueue-3": 2}, 60)
    found = listed()["kueue-3"]
    assert (found["stage"], found["place"], found["held"], found["priority"]) == ("train", QUEUE, False, 0)
    assert "couldn't assign flavors" in found["reason"]
    assert found["eta"] is None  # nobody knows how long the one before it takes
    assert 400 < listed()["kueue-2"]["eta"] <= 600
    assert "it waits in no queue: its job is running" in str(terminal("queue", "hold", "kueue-1").exception)

    assert "kueue-3 has priority 5" in told("priority", "kueue-3", "5")
    wait("the new order", lambda: places() == {"kueue-3": 1, "kueue-2": 2}, 60)
    assert listed()["kueue-3"]["priority"] == 5
    told("hold", "kueue-3")
    wait("the order without it", lambda: places() == {"kueue-3": None, "kueue-2": 1}, 60)
    found = listed()["kueue-3"]
    assert (found["held"], found["priority"]) == (True, 5)
    assert "held back from queue training: a user has set it inactive" in found["reason"]
    assert found["eta"] is None
    assert "training held" in told()

    # Room comes, and who is behind it takes it.
    runs.end(first)
    stale = second.created.job
    second.running()
    seen = third.look()
    assert (seen.phase, seen.pods_running) == (Phase.QUEUED, 0)
    # A look from before that may not end what runs by now.
    from kubernetes import config

    client = config.new_client_from_config(os.environ["KUBECONFIG"])
    waiting = {**stale, "spec": {**stale["spec"], "runPolicy": {**stale["spec"]["runPolicy"], "suspend": True}}}
    with pytest.raises(JobRefusedError, match="has just admitted it"):
        Standings(client).stand(waiting, held=True)
    assert second.look().phase is Phase.RUNNING

    told("release", "kueue-3")
    wait("its place in the queue", lambda: places() == {"kueue-3": 1}, 60)
    found = listed()["kueue-3"]
    assert (found["held"], found["priority"]) == (False, 5)
    assert "evicted" not in found["reason"], found["reason"]
    runs.end(second)
    third.running()
    assert "No run waits" in told()


def test_what_cannot_be_moved_says_why(
    runs: Runs, terminal: Terminal, rights: Rights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: str) -> str:
        done = terminal("queue", "hold", run)
        assert done.exit_code == 1
        return str(done.exception)

    lonely = runs.train("kueue-alone", nodes=1, gpus=100, **PRETEND)
    lonely.until(lambda seen: seen.phase is Phase.QUEUED and "nsufficient" in seen.message)
    (found,) = json.loads(terminal("queue", "--json").stdout)
    assert (found["run"], found["place"], found["position"]) == ("kueue-alone", "cluster", None)
    assert "nsufficient nvidia.com/gpu" in found["reason"]
    assert "no queue holds it back" in refused("kueue-alone")
    assert "kueue-none" in refused("kueue-none")
    runs.end(lonely)

    nowhere = runs.train("kueue-nowhere", **{**GANG, "queue": "no-such-queue"})
    nowhere.until(lambda seen: "no-such-queue" in seen.message)
    (found,) = json.loads(terminal("queue", "--json").stdout)
    assert "no-such-queue" in found["reason"]
    as_of(rights.kubeconfig, monkeypatch)  # which may see it, and no more
    said = refused("kueue-nowhere")
    assert "403" in said
    assert 'cannot patch resource "workloads"' in said
    as_of(ADMIN, monkeypatch)  # whom the cluster tells what it does not know at all
    monkeypatch.setattr(kueue, "GROUP", "no-kueue.example.org")
    assert "Kueue has no Workload of it. See whether Kueue runs" in refused("kueue-nowhere")


def typed(*words: str, data: bytes = b"") -> tuple[int, bytes, str]:
    """A command in a process of its own: its exit code, output and errors."""
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", *words]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stdout, " ".join(done.stderr.decode().split())


@pytest.fixture
def gang(runs: Runs) -> Job:
    """Three real pods, the last of which has ended."""
    job = runs.train("shell-1", f'case "$HOSTNAME" in *worker-1) exit 0;; esac; {SLEEP}', nodes=3)
    job.until(lambda seen: seen.pods_running == 2 and "1 are done" in seen.message)
    return job


def test_a_command_in_a_pod_has_our_streams_and_we_its_exit_code(runs: Runs, gang: Job) -> None:
    code, output, errors = typed("shell", "shell-1", "-r", "1", "--", "sh", "-c", "hostname; echo no >&2; exit 7")
    assert (code, output.decode().strip(), errors) == (7, gang.pod(1), "no")
    data = bytes(range(256)) * 4096  # a megabyte, both ways at once, with what is no text
    assert typed("shell", "shell-1", "--", "cat", data=data) == (0, data, "")
    assert typed("shell", "shell-1", data=b"echo $((6 * 7))\n")[:2] == (0, b"42\n")  # a shell without a terminal
    code, _, errors = typed("shell", "shell-1", "--", "/none/[/red]")
    assert (code, "/none/[/red]" in errors) == (2, True)


def test_a_shell_in_a_pod_is_a_terminal(gang: Job) -> None:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    before = termios.tcgetattr(child)
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", "shell", "shell-1", "-r", "1"]
    env = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
    seen = ""

    def until(words: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while words not in seen:
            assert time.monotonic() < end, seen
            if select.select([parent], [], [], 0.2)[0]:
                seen += os.read(parent, 4096).decode(errors="replace")
        seen = seen.partition(words)[2]

    def key(text: str) -> None:
        os.write(parent, text.encode())

    try:
        until("# ")
        key("stty size; echo at $(hostname)\n")
        until("31 97")
        until(f"at {gang.pod(1)}")
        key("sh -c 'echo begun; sleep 600'\n")
        until("begun\r\n")
        key("\x03")  # ends what runs there, and not us
        until("# ")
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 22, 81, 0, 0))
        key("until stty size | grep '22 81'; do sleep 0.1; done; exit 5\n")
        until("22 81\r\n")
        assert process.wait(60) == 5
        assert termios.tcgetattr(child) == before
    finally:
        process.kill()
        os.close(parent)
        os.close(child)


def test_where_no_shell_can_be_it_says_why(
    runs: Runs, gang: Job, rights: Rights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        code, output, errors = typed("shell", *words, "--", "true")
        assert (code, output) == (2, b""), errors
        return errors

    assert f"rank 2 of job {gang.name}: its pod {gang.pod(2)} has succeeded" in refused("shell-1", "-r", "2")
    assert "the job has ranks 0 to 2. Name one of its ranks" in refused("shell-1", "-r", "3")
    runs.train(
        "shell-2",
        **{**GANG, "gpus": 0, "nodes": 1},
    ).running()
    said = refused("shell-2")
    assert "the cluster does not let you in (" in said
    assert "on which node" in said
    waits = runs.train("shell-3", nodes=1, gpus=100, **PRETEND)
    waits.until(lambda seen: "nsufficient" in seen.message)
    assert "is pending: " in refused("shell-3")
    as_of(rights.kubeconfig, monkeypatch)
    said = refused("shell-1")
    assert "403" in said
    assert "You need the rights `get` and `create` on pods/exec there" in said
