"""When a service counts as ready."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dropforge.client.connection import connect
from dropforge.errors import DropforgeError
from dropforge.stack import health, processes
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import StackState, lock_path, mark_path, write_state
from tests.stack.test_supervisor import until


def test_the_cluster_is_ready_while_its_supervisor_lives(tmp_path: Path) -> None:
    works = health.LocalCluster(tmp_path)
    assert not works()
    process = subprocess.Popen([sys.executable, "-m", "kubeflow_training.jobs.local", str(tmp_path)])
    try:
        until(works)
    finally:
        process.kill()
        # Dead, and not yet reaped: the signature that it left behind means nothing.
        until(lambda: not works())
        process.wait()
    signature = tmp_path / "supervisor.json"
    signed = signature.read_text()
    for torn in (signed, signed[:-9], "", "[]", "{}", '{"pid": "x"}', '{"pid": null, "start": 1, "boot": 1}'):
        signature.write_text(torn)
        assert not works()


TOUCHING = """
import sys
from pathlib import Path
from kubeflow_training.jobs.local import supervisor
supervisor._TOUCH_SECONDS = 0.05
supervisor.Supervisor(Path(sys.argv[1])).run()
"""


def test_a_cluster_that_stands_still_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = health.LocalCluster(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", TOUCHING, str(tmp_path)])
    try:
        until(works)
        monkeypatch.setattr(health, "_SILENT", 0.6)
        until(works)
        process.send_signal(signal.SIGSTOP)
        until(lambda: not works())
        process.send_signal(signal.SIGCONT)
        until(works)
        before = time.time() + 86400  # as a clock that is set makes it look
        os.utime(tmp_path / "supervisor.json", (before, before))
        assert works()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["head", "body"])
def test_who_answers_little_by_little_is_not_heard_out(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_WHOLE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(health.answers, server.getsockname()[1], "/")
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            for byte in answer + b"a" * 600:
                client.send(bytes([byte]))
                if asked.done():
                    break
                time.sleep(0.01)
            assert asked.done()


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MOST", 99)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(health.fetch, server.getsockname()[1], "/")
        client, _ = server.accept()
        with client:
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + b"a" * 100)
            client.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match="more than 0 MiB"):
                asked.result(5)


@pytest.fixture
def airflow() -> Iterator[tuple[int, set[str], list[str]]]:
    """Port of what answers as Airflow's API to who is logged in, the DAGs that it knows, and its broken files."""
    dags: set[str] = set()
    broken: list[str] = []

    class Api(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            login = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(201 if login == {"username": "admin", "password": "right"} else 401, {"access_token": "token"})

        def do_GET(self) -> None:
            _, _, of = self.path.partition("?")[0].rpartition("/")
            errors = of == "importErrors"
            status = 200 if errors or of in dags else 404
            status = status if self.headers["Authorization"] == "Bearer token" else 401
            self.answer(
                status, {"import_errors": [{"filename": file} for file in broken]} if errors else {"dag_id": of}
            )

        def answer(self, status: int, body: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, dags, broken
    server.shutdown()
    server.server_close()


def test_airflow_is_ready_when_it_knows_each_dag_or_why_its_file_has_none(
    airflow: tuple[int, set[str], list[str]],
) -> None:
    port, dags, broken = airflow
    read = health.DagsRead(port, "admin", "right", {"d_finetune": "finetune.py", "d_intake": "intake.py"})
    assert not read()
    dags |= {"d_intake", "d_retrain"}
    assert not read()
    broken += ["finetune.py"]
    assert read()
    dags.clear()
    assert read(), "it is asked until the first yes"
    assert not health.DagsRead(port, "admin", "wrong", {"d_finetune": "finetune.py"})()


FOREIGN = """
import os, socket, sys
address = sys.argv[1]
os.setuid(65534)
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.create_server((address, 0), family=family, dualstack_ipv6=":" in address) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        connection = listener.accept()[0]
        print(connection.recv(1 << 16), flush=True)
        connection.sendall(b"HTTP/1.0 201 Created\\r\\n\\r\\n" + b'{"access_token": "x"}')
        connection.close()
"""


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def foreign(request: pytest.FixtureRequest) -> Iterator[tuple[int, Path]]:
    """The port of another user's server, and the file in which stands what it was told."""
    if os.geteuid() != 0:
        pytest.skip("only root has programs run as another user")
    with tempfile.NamedTemporaryFile() as told:
        command = [sys.executable, "-c", FOREIGN, request.param]
        process = subprocess.Popen(command, stdout=told)
        try:
            until(lambda: b"\n" in Path(told.name).read_bytes())
            yield int(Path(told.name).read_text()), Path(told.name)
        finally:
            process.kill()
            process.wait()


def test_another_user_s_program_at_the_port_is_told_no_password_and_is_not_healthy(
    foreign: tuple[int, Path], tmp_path: Path
) -> None:
    """Any user may take a port before the service that it is for: its number stands in the supervisor's arguments."""
    port, told = foreign
    with pytest.raises(OSError, match=f"port {port} is taken by a program of another user"):
        health.DagsRead(port, "admin", "geheim", {})()
    traces = processes.Traces("boot", "id", mark_path(tmp_path), frozenset())
    ports = {"objects": 1, "mlflow": 2, "airflow": port}
    write_state(StackState(tmp_path, "ready", ports, {}, (1, 1), traces, 0.0, read_secrets(tmp_path)))
    with lock_path(tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            DropforgeError, match=f"port {port}, which is the stack's for airflow: a program of another"
        ):
            connect(tmp_path)
    assert told.read_text().split() == [str(port)]
