"""`dropforge follow` ends with its run, and not later than the services that it asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropforge import tracking
from dropforge.client import patience
from dropforge.drop import Drop
from dropforge.stack.processes import Traces
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import StackState, is_running, lock_path, mark_path, write_state
from dropforge.stages import STAGES
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

OPENED = ("success",) * STAGES.index("train")
NOBODY = 1  # a port on which nobody listens
HOLDER = "import fcntl, sys, time; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); time.sleep(600)"


@pytest.fixture
def supervisor(tmp_path: Path, airflow: FakeAirflow) -> Iterator[subprocess.Popen[bytes]]:
    """What holds the state folder of a stack whose Airflow is the test's, and whose other services are away."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock_path(tmp_path))]) as holder:
        traces = Traces("boot", "id", mark_path(tmp_path), frozenset())
        ports = {"airflow": airflow.server_address[1], "mlflow": NOBODY, "objects": NOBODY}
        secrets = read_secrets(tmp_path)
        write_state(StackState(tmp_path, "ready", ports, {}, (holder.pid, 0), traces, time.time(), secrets))
        deadline = time.monotonic() + 30
        while not is_running(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield holder
        holder.kill()


def dropforge(folder: Path, *words: str) -> subprocess.Popen[str]:
    code = "from dropforge.cli.app import main; main()"
    command = [sys.executable, "-u", "-c", code, *words, "--state", str(folder)]
    env = {**os.environ, "COLUMNS": "300", "TERM": "dumb"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("way", ["killed", "stopping"])
def test_a_stack_that_is_stopped_ends_it_at_once(
    supervisor: subprocess.Popen[bytes], airflow: FakeAirflow, tmp_path: Path, way: str
) -> None:
    run = airflow.add(DagRun("manual__1", "running", (*OPENED, "running")))
    with dropforge(tmp_path, "follow", "manual__1") as following:
        deadline = time.monotonic() + 60
        while run.looks < 3:  # it bears with MLflow, which is away all the time
            assert following.poll() is None, following.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if way == "killed":
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait()
            airflow.shutdown()
            airflow.server_close()
        else:
            stack = (tmp_path / "stack.json").read_text()
            new = tmp_path / "stack.new"
            new.write_text(stack.replace('"ready"', '"stopping"'))
            new.replace(tmp_path / "stack.json")  # at once, as the supervisor writes it: it is being read
        out, err = following.communicate(timeout=30)
    assert following.returncode == 2
    assert "train: running" in out
    assert err.splitlines()[-2:] == [
        f"error: stack in {tmp_path}: it was stopped meanwhile.",
        "Start it with `dropforge up`, and unfinished runs continue; then `dropforge follow manual__1`.",
    ]


def test_a_drop_that_nobody_takes_does_not_wait_for_a_stack_that_is_stopped(
    supervisor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    from dropforge.client.connection import connect
    from dropforge.client.drops import wait_for_run
    from dropforge.errors import DropforgeError

    before = dict(os.environ)
    try:
        connection = connect(tmp_path)
        supervisor.kill()
        supervisor.wait()
        drop = Drop(family="fam", drop="d", id="a" * 32, bucket="b", files=())
        with pytest.raises(DropforgeError, match="stopped meanwhile"):
            wait_for_run(connection, drop)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_services_that_stay_away_end_it_after_a_while(
    terminal: Terminal, airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LIMIT", 1.0)
    run = airflow.add(DagRun("manual__1", "running", ("running",)))

    def go_away() -> None:
        while run.looks < 2:
            time.sleep(0.01)
        airflow.shutdown()
        airflow.server_close()

    thread = threading.Thread(target=go_away)
    thread.start()
    done = terminal("follow", "manual__1")
    thread.join()
    assert f"Airflow at {airflow.url}: it does not answer" in str(done.exception)
    assert "s now. Start the stack with `dropforge up`; then `dropforge follow manual__1`" in str(done.exception)


def test_services_that_come_back_are_waited_for(
    terminal: Terminal, airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow does not come back: Airflow alone tells how the run ends."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{NOBODY}")
    run = airflow.add(DagRun("manual__1", "running", (*OPENED, "running"), ends_at_look=4))

    def go_away() -> None:
        while run.looks < 2:
            time.sleep(0.01)
        airflow.away = 3

    thread = threading.Thread(target=go_away)
    thread.start()
    done = terminal("follow", "manual__1")
    thread.join()
    assert done.exit_code == 0, done.output
    assert airflow.away == 0
    assert "MLflow does not answer" in done.output


def test_no_command_waits_for_minutes_for_mlflow(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{NOBODY}")
    began = time.monotonic()
    for words in (["follow"], ["runs"]):
        assert f"MLflow at http://127.0.0.1:{NOBODY}: it gives no answer" in str(terminal(*words).exception)
    assert time.monotonic() - began < 60


def test_the_total_of_steps_is_shown_for_a_run_whose_length_is_epochs(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str
) -> None:
    mlflow = tracking.client(mlflow_server)
    tags = {tracking.TAG_RUN: "epochs-1", tracking.TAG_DAG_RUN: "manual__epochs"}
    run = mlflow.create_run(mlflow.create_experiment("epochs"), tags=tags).info.run_id
    mlflow.log_param(run, "train.epochs", "2.0")
    for step in (1, 2, 3):
        mlflow.log_metric(run, "train/loss", 4.0 / step, step=step)
    airflow.add(DagRun("manual__epochs", "success", ("success",) * len(STAGES)))
    # From before the trainer has said what its plan is.
    assert "train: step 3, loss 1.333" in terminal("follow", "manual__epochs").output
    mlflow.set_tag(run, tracking.TAG_STEPS, "40")
    assert "train: step 3/40, loss 1.333" in terminal("follow", "manual__epochs").output
