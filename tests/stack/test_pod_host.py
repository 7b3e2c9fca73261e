"""Only when it is told to, the stack listens on one more address; then pods of a cluster get all they need."""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path

import pytest

from dropforge.errors import DropforgeError
from dropforge.stack import control
from dropforge.stack.secrets import read_secrets
from dropforge.stack.services import services
from tests.stack.conftest import Server

PODS = "127.0.0.2"  # another address of every Linux machine


def status(host: str, port: int, name: str) -> int:
    """What the store answers when it is asked by this name; 0 if nobody listens."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/-/health", headers={"Host": f"{name}:{port}"})
        return connection.getresponse().status
    except ConnectionError:
        return 0
    finally:
        connection.close()


def test_pods_reach_the_store_by_the_address_that_was_told_and_no_other(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.arguments = ["--pod-host", PODS]
    server.start()
    try:
        assert status(PODS, server.port, PODS) == 200
        assert status("127.0.0.1", server.port, "127.0.0.1") == 200
        assert status(PODS, server.port, "evil.example") == 403
        assert status("127.0.0.3", server.port, "127.0.0.3") == 0
    finally:
        server.kill()
    server.arguments = []
    server.start()
    try:
        assert status(PODS, server.port, PODS) == 0
    finally:
        server.kill()


def test_both_services_that_pods_need_are_told(tmp_path: Path) -> None:
    secrets, ports = read_secrets(tmp_path), {"objects": 1, "mlflow": 2, "airflow": 3}
    told = {one.name for one in services(tmp_path, ports, secrets, PODS) if PODS in one.command}
    assert told == {"objects", "mlflow"}
    assert not any(PODS in one.command for one in services(tmp_path, ports, secrets))


@pytest.mark.parametrize("address", ["10.255.255.254", "example.com", "0.0.0.0/0", ""])
def test_an_address_that_is_not_this_machines_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(DropforgeError, match="no IPv4 address of this machine"):
        control.start(tmp_path / "state", pod_host=address)


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("0.0.0.0", "of all of this one's"),
        ("224.0.0.1", "a group's"),
        ("255.255.255.255", "whole network's"),
        ("127.255.255.255", "whole network's"),
        ("127.0.0.1", "listens anyway"),
    ],
)
def test_an_address_that_no_pod_can_ask_is_refused_by_name(tmp_path: Path, address: str, cause: str) -> None:
    with pytest.raises(DropforgeError, match=cause) as error:
        control.start(tmp_path / "state", pod_host=address)
    assert error.value.thing == f"address {address}"


def dropforge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "dropforge"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_stack_that_does_not_run_has_no_secret_for_pods(tmp_path: Path) -> None:
    done = dropforge("secret", "--state", str(tmp_path))
    assert done.returncode == 2
    assert "up --pod-host" in done.stderr
