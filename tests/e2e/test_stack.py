"""The stack itself: what listens, what is told, what dies and comes back. It is stopped here: nothing comes after."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from dropforge.job import SECRET
from dropforge.stack import control, health, processes
from dropforge.stack.state import StackState, is_running, read_state
from dropforge.store import S3Store
from tests.e2e.harness import Stack
from tests.stack.test_pod_host import PODS, dropforge
from tests.stack.test_supervisor import kill_supervisor

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(stack: Stack) -> Path:
    return stack.folder


def state(folder: Path) -> StackState:
    found = read_state(folder)
    assert found is not None
    return found


def descendants(folder: Path) -> set[int]:
    root = state(folder).supervisor[0]
    return {root} | processes.descendants([root], processes.table())


def until(condition: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_nothing_listens_beyond_this_machine(folder: Path) -> None:
    sockets = set()
    for pid in descendants(folder):
        with suppress(FileNotFoundError, PermissionError):  # a task may end meanwhile; its process is the root's then
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    target = str(entry.readlink())
                    if target.startswith("socket:["):
                        sockets.add(target[8:-1])
    listening = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening.append(fields[1])
    addresses = {address.split(":")[0] for address in listening}
    ports = {int(address.split(":")[1], 16) for address in listening}
    assert addresses == {"0100007F"}  # 127.0.0.1, as the kernel writes it
    assert ports == set(state(folder).ports.values())


def test_secrets_are_in_no_argument_and_no_log(folder: Path) -> None:
    secrets = state(folder).secrets
    texts = []
    for pid in descendants(folder):
        with suppress(FileNotFoundError, ProcessLookupError):
            texts.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    texts += [path.read_bytes() for path in (folder / "logs").iterdir()]
    for secret in vars(secrets).values():
        assert not any(secret.encode() in text for text in texts)
    for path in ("secrets.json", "stack.json", "airflow/passwords.json"):
        assert (folder / path).stat().st_mode & 0o777 == 0o600


def token(folder: Path, password: str) -> str:
    body = json.dumps({"username": "admin", "password": password}).encode()
    request = urllib.request.Request(
        f"{state(folder).settings.airflow_url}/auth/token", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["access_token"])


def test_airflow_lets_in_its_one_user_only(folder: Path) -> None:
    assert token(folder, state(folder).login[1])
    with pytest.raises(urllib.error.HTTPError) as error:
        token(folder, "wrong")
    assert error.value.code == 401


def test_artifacts_of_mlflow_lie_in_the_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    for name, value in state(folder).env().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "note.txt").write_text("hello")
    client = MlflowClient(state(folder).settings.tracking_uri)
    run = client.create_run(client.create_experiment("e2e")).info.run_id
    client.log_artifact(run, str(tmp_path / "note.txt"))
    keys = [info.key for info in S3Store("dropforge").list("mlflow/")]
    assert [key for key in keys if key.endswith(f"{run}/artifacts/note.txt")]


@pytest.mark.parametrize("service", ["objects", "airflow-api", "database"])
def test_a_killed_service_comes_back_with_its_data(folder: Path, monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    for name, value in state(folder).env().items():
        monkeypatch.setenv(name, value)
    S3Store("dropforge").put("kept", b"bytes")
    before = state(folder).services[service]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: state(folder).services[service].restarts > before.restarts, 30)
    until(lambda: state(folder).phase == "ready", 240)
    assert S3Store("dropforge").get("kept") == b"bytes"


def all_of(folder: Path) -> list[processes.Process]:
    table = processes.table()
    found = [table[pid] for pid in descendants(folder) if pid in table]
    assert len(found) > 8
    return found


def test_down_after_a_crash_leaves_no_process(folder: Path) -> None:
    before = all_of(folder)
    kill_supervisor(state(folder))
    assert not is_running(folder)
    assert control.stop(folder)
    assert [process for process in before if processes.alive(process)] == []


@pytest.fixture(scope="module")
def next_up(folder: Path) -> tuple[StackState, StackState]:
    """The stack before it is stopped, and after the next `up`, which opens it to a cluster's pods."""
    first = state(folder)
    control.stop(folder)
    assert control.start(folder, pod_host=PODS)
    return first, control.wait_ready(folder)


def test_the_next_up_is_the_same_stack(next_up: tuple[StackState, StackState]) -> None:
    first, again = next_up
    assert (again.ports, again.secrets) == (first.ports, first.secrets)
    assert "airflow-db" not in again.services


def test_the_secret_leads_pods_to_this_stack(
    folder: Path, next_up: tuple[StackState, StackState], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = next_up
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    done = dropforge("secret", "--state", str(folder), "--namespace", "training")
    assert done.returncode == 0, done.stderr
    secret = yaml.safe_load(done.stdout)
    assert (secret["kind"], secret["metadata"]) == ("Secret", {"name": SECRET, "namespace": "training"})
    values = secret["stringData"]
    assert values["AWS_ACCESS_KEY_ID"] == found.secrets.access_key
    assert values["HF_TOKEN"] == "hf_mine"
    assert values["MLFLOW_TRACKING_URI"] == f"http://{PODS}:{found.ports['mlflow']}"
    for url in (values["MLFLOW_TRACKING_URI"] + "/health", values["AWS_ENDPOINT_URL"] + "/-/health"):
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
    assert health.answers(found.ports["mlflow"], "/health")


def test_down_leaves_no_process(folder: Path, next_up: tuple[StackState, StackState]) -> None:
    before = all_of(folder)
    assert control.stop(folder)
    assert [process for process in before if processes.alive(process)] == []
