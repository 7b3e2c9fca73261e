"""The real API server of the cluster is stopped for a minute and started again: no job is lost, none is made twice.

Everything else on the cluster feels it, so this runs alone: `make test-cluster` runs it after the other tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.kills.installation import until

TOOL = Path(os.environ.get("TEST_CLUSTER", Path(__file__).parents[4] / "shared/cluster/cluster"))
AWAY = 60  # seconds
SLOW = 120  # the cluster's own controllers come back in their own time
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.e2e,
    pytest.mark.parametrize(
        "place",
        [pytest.param("on_kubernetes", marks=[pytest.mark.cluster, pytest.mark.outage], id="kubernetes")],
        indirect=True,
    ),
]


class ApiServer:
    """A kube-apiserver that is a process of this machine, and what starts it again."""

    def __init__(self, address: tuple[str, int], process: psutil.Process) -> None:
        self.address, self._process = address, process

    def answers(self) -> bool:
        with socket.socket() as asked:
            return asked.connect_ex(self.address) == 0

    @contextmanager
    def away(self) -> Iterator[None]:
        self._process.terminate()
        try:
            until(lambda: not self.answers())
            # It refuses at once, but serves open watches for up to a minute more: nobody would notice till then.
            with suppress(psutil.TimeoutExpired):
                self._process.wait(5)
            self._end()
            yield
        finally:
            self._end()
            started = subprocess.run([TOOL, "up"], capture_output=True, text=True)
        assert started.returncode == 0, started.stdout + started.stderr
        until(self.answers)

    def _end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.kill()
            self._process.wait(30)


@pytest.fixture
def api_server() -> ApiServer:
    known = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    server = urlsplit(known["clusters"][0]["cluster"]["server"])
    port = server.port or 443
    # Only the one that answers at KUBECONFIG's own address, and only if it can be started again.
    if TOOL.is_file() and server.hostname in ("127.0.0.1", "localhost"):
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "kube-apiserver" and port in _listening(process):
                return ApiServer((server.hostname, port), process)
    pytest.skip("the API server of this cluster is no process that this test may stop and start")


def _listening(process: psutil.Process) -> set[int]:
    with suppress(psutil.Error):
        return {item.laddr.port for item in process.net_connections("tcp") if item.status == psutil.CONN_LISTEN}
    return set()


def complete(run) -> None:
    """Each line of the job is in the task's log, once."""
    lines = run.lines()
    told = [line for line in lines if line.startswith("line ")]
    ends = [int(line.removeprefix("that was ")) for line in lines if line.startswith("that was ")]
    assert len(ends) == 1, f"{run.name}, {told[-3:]}: {run.text()[-6000:]}"
    (count,) = ends
    assert told == [f"line {n}" for n in range(count)], run.text()


def test_the_api_server_is_stopped_for_a_minute(airflow, new_run, api_server):
    waiting, watching = new_run("deferred"), new_run("sync")
    waiting.deferred()
    watching.running()
    ending = new_run("deferred", "timed")
    ending.deferred()
    uids = [run.uid() for run in (waiting, watching, ending)]
    with api_server.away():
        began = time.monotonic()
        submitted = new_run("deferred")
        for run in (waiting, watching):
            until(lambda run=run: "cannot ask about job" in run.text(), AWAY, airflow.log)
        until(lambda: time.monotonic() > began + AWAY, AWAY)
        assert (waiting.state, watching.state, ending.state, submitted.state) == (
            "deferred",
            "running",
            "deferred",
            "running",
        )
    ending.told_once(uids[2], SLOW)  # it ended while nobody could tell it
    submitted.until(lambda: submitted.phase() is Phase.RUNNING, SLOW)
    submitted.deferred()
    for run, uid in zip((waiting, watching, submitted), (*uids[:2], submitted.uid()), strict=True):
        assert run.uid() == uid
        run.place.release(run.name)
        run.told_once(uid, SLOW)
    for run in (waiting, watching, ending, submitted):
        assert (run.tries, run.gangs()) == (1, [run.name])
        complete(run)
