"""What a power cut or a full disk may have left of a stack's files: every command tells it, with the mend."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dropforge.cli import app as command_line
from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.stack import databases
from dropforge.stack.databases import Databases
from dropforge.stack.doctor import Level, examine
from dropforge.stack.postgres import forget_dead_server
from dropforge.stack.processes import Traces
from dropforge.stack.secrets import Secrets, read_secrets
from dropforge.stack.state import ServiceState, StackState, is_running, lock_path, mark_path, read_state, write_state


def commands(group: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, *above, name)
        else:
            yield (*above, name), one


# What a foreign program may have written: all is there, and nothing as it should be.
ODD = json.dumps(
    {
        **{"phase": "ready", "ports": [1], "services": {}, "supervisor": [1, 0], "started": 0},
        "traces": {"boot": "b", "stack_id": "i", "processes": []},
    }
)


@pytest.mark.parametrize(
    ("file", "text"),
    [("stack.json", ""), ("stack.json", ODD), ("stack.json", None), ("secrets.json", '{"access_key": "DF')],
    ids=["empty", "other", "folder", "torn secrets"],
)
def test_a_torn_state_is_told_with_its_mend_by_every_command(tmp_path: Path, file: str, text: str | None) -> None:
    folder = tmp_path / "state"
    read_secrets(folder)
    ports, traces = {"objects": 1, "mlflow": 2, "airflow": 3}, Traces("boot", "id", mark_path(folder), frozenset())
    write_state(StackState(folder, "stopped", ports, {}, (1, 0), traces, 0.0, Secrets()))
    (folder / file).unlink()
    (folder / file).mkdir() if text is None else (folder / file).write_text(text)
    told = set()
    for names, command in commands(typer.main.get_command(app)):
        options = {name for one in command.params for name in one.opts}
        if "--state" not in options:
            continue
        given = ["a/b" for one in command.params if one.required for _ in range(abs(one.nargs))]
        error = CliRunner().invoke(app, [*names, "--state", str(folder), *given]).exception
        assert error is None or isinstance(error, DropforgeError | SystemExit), (names, error)
        if isinstance(error, DropforgeError) and file in error.thing:
            assert "elete it" in error.mend
            told.add(" ".join(names))
    assert told >= {"up", "down", "demo", "follow", "runs", "env", "secret", "logs", "approve"}
    (finding,) = [one for one in examine(folder) if one.check == "ports"]
    assert finding.level is Level.FAIL
    assert file in finding.found


@pytest.mark.parametrize(
    "odd",
    [
        {"phase": 5},
        {"started": "x"},
        {"pod_host": 5},
        {"ports": {"objects": 1}},
        {"services": {"x": {"status": None}}},
        {"services": {"x": {"status": "failed", "pid": "a"}}},
        {"services": {"x": {"status": "failed", "restarts": "b"}}},
        {"services": {"x": {"status": "failed", "message": 7}}},
        {"traces": {"boot": 5, "stack_id": "i", "processes": []}},
        {"traces": {"boot": "b", "stack_id": None, "processes": []}},
    ],
    ids=lambda odd: "-".join(str(word) for name in odd for word in (name, odd[name])),
)
def test_a_value_of_another_kind_is_told_as_what_is_torn(tmp_path: Path, odd: dict[str, Any]) -> None:
    read_secrets(tmp_path)
    ports, traces = {"objects": 1, "mlflow": 2, "airflow": 3}, Traces("boot", "id", mark_path(tmp_path), frozenset())
    services = {"a": ServiceState("healthy", 1, 2), "b": ServiceState("waiting")}
    write_state(StackState(tmp_path, "ready", ports, services, (1, 0), traces, 0.0, Secrets(), "10.0.0.1"))
    assert read_state(tmp_path) is not None
    path = tmp_path / "stack.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    with pytest.raises(DropforgeError, match=r"stack\.json: it cannot be read .* Delete it"):
        read_state(tmp_path)


@pytest.mark.parametrize("kind", ["deep", "large", "pipe", "device"])
def test_what_lies_in_the_place_of_a_state_file_ends_no_command(tmp_path: Path, kind: str) -> None:
    def put(name: str) -> None:
        path = tmp_path / name
        if kind == "deep":
            path.write_text("[" * 100_000)
        elif kind == "large":
            path.touch()
            os.truncate(path, 1 << 40)  # more than any machine's memory, and no block of the disk
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")

    put("stack.json")
    with pytest.raises(DropforgeError, match=r"stack\.json: it cannot be read .* Delete it"):
        read_state(tmp_path)
    put("database.json")
    with pytest.raises(DropforgeError, match=r"database\.json: it cannot be read .* Delete it"):
        databases.check(tmp_path, Databases.of(tmp_path, {}))
    put("secrets.json")
    with pytest.raises(DropforgeError, match=r"secrets\.json: they cannot be read .* delete it"):
        read_secrets(tmp_path)
    put("postmaster.pid")
    forget_dead_server(tmp_path / "postmaster.pid", tmp_path)
    if kind == "pipe":
        put(lock_path(tmp_path).name)
        assert not is_running(tmp_path)


@pytest.mark.parametrize("text", ["", "zzz\n\n", "0\n", f"{1 << 40}\n", "\udcff"])
def test_a_torn_lock_of_the_database_goes_unless_its_server_lives(tmp_path: Path, text: str) -> None:
    lock, data = tmp_path / "postmaster.pid", tmp_path / "data"
    data.mkdir()
    lock.write_bytes(os.fsencode(text))
    with subprocess.Popen(["sleep", "600"], cwd=data) as server:
        forget_dead_server(lock, data)
        assert lock.exists()
        server.kill()
    forget_dead_server(lock, data)
    assert not lock.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_torn_note_of_the_database_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "database.json").write_text(text)
    with pytest.raises(DropforgeError, match=r"database\.json.*cannot be read.*Delete it"):
        databases.check(tmp_path, Databases.of(tmp_path, {}))


def test_a_lock_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    lock_path(tmp_path).symlink_to(lock_path(tmp_path))  # as one of another user, for who is no root
    with pytest.raises(DropforgeError, match="state folder"):
        is_running(tmp_path)


def test_a_disk_that_is_full_or_read_only_is_told_with_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/data/stack/logs")

    monkeypatch.setattr(command_line, "app", fails)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told == (
        "error: file /data/stack/logs: Read-only file system. Mount its disk for writing, or choose another folder."
    )
