"""The whole stack with the real Airflow and MLflow: what listens, what is told, what dies and comes back."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dropforge.stack import control, processes
from dropforge.stack.state import StackState, read_state
from dropforge.store import S3Store

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("stack") / "state"
    assert control.start(found)
    try:
        control.wait_ready(found)
        yield found
    finally:
        control.stop(found)


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
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except FileNotFoundError:
                continue
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
    texts = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(folder)]
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


@pytest.mark.parametrize("service", ["objects", "airflow-api"])
def test_a_killed_service_comes_back_with_its_data(folder: Path, monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    for name, value in state(folder).env().items():
        monkeypatch.setenv(name, value)
    S3Store("dropforge").put("kept", b"bytes")
    before = state(folder).services[service]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: state(folder).services[service].restarts > before.restarts, 30)
    until(lambda: state(folder).phase == "ready", 120)
    assert S3Store("dropforge").get("kept") == b"bytes"


def test_down_leaves_no_process_and_the_next_up_is_the_same_stack(folder: Path) -> None:
    first = state(folder)
    table = processes.table()
    before = [table[pid] for pid in descendants(folder) if pid in table]
    assert len(before) > 8
    # As after a crash: nobody is left to clean up.
    supervisor = processes.look(first.supervisor[0])
    assert supervisor is not None
    processes.send(supervisor, signal.SIGKILL)
    until(lambda: not processes.alive(supervisor), 10)
    assert control.stop(folder)
    assert [process for process in before if processes.alive(process)] == []
    assert control.start(folder)
    again = control.wait_ready(folder)
    assert (again.ports, again.secrets) == (first.ports, first.secrets)
    assert "airflow-db" not in again.services
    before = [table[pid] for pid in descendants(folder) if pid in (table := processes.table())]
    assert control.stop(folder)
    assert [process for process in before if processes.alive(process)] == []
