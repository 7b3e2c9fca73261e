"""Which services a command speaks to: those of a folder that was named, of the environment, of the default folder."""

from __future__ import annotations

import fcntl
import io
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dropforge.cli.connect import connect, stack_folder
from dropforge.cli.services import show_addresses
from dropforge.errors import DropforgeError
from dropforge.stack.processes import Traces
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import StackState, lock_path, mark_path, read_state, write_state
from dropforge.terminal import Console

SERVER = {
    "DROPFORGE_BUCKET": "acme",
    "MLFLOW_TRACKING_URI": "http://mlflow.acme.example",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, with a stack that was stopped."""
    monkeypatch.chdir(tmp_path)
    for name in ("DROPFORGE_STATE", *SERVER):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / ".dropforge"
    secrets, traces = read_secrets(folder), Traces("boot", "id", mark_path(folder), frozenset())
    ports = {"airflow": 1, "mlflow": 1, "objects": 1}
    write_state(StackState(folder, "stopped", ports, {}, (1, 0), traces, time.time(), secrets))
    return folder


@pytest.mark.parametrize("terminal", [True, False])
def test_a_password_is_shown_in_a_terminal_and_in_no_log(demo: Path, terminal: bool) -> None:
    state = read_state(demo)
    assert state is not None
    out = io.StringIO()
    show_addresses(state, Console(file=out, force_terminal=terminal, width=400))
    assert (state.secrets.airflow_password in out.getvalue()) == terminal
    assert (state.secrets.mlflow_password in out.getvalue()) == terminal
    assert (str(demo / "secrets.json") in out.getvalue()) != terminal


@pytest.mark.parametrize("running", [False, True])
def test_whoever_names_a_bucket_is_not_sent_to_the_demo(
    demo: Path, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    for name, value in SERVER.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as held:
        if running:
            fcntl.flock(held.enter_context(lock_path(demo).open("w")), fcntl.LOCK_EX)
        found = connect(None)
    assert (found.settings.bucket, found.settings.tracking_uri) == ("acme", SERVER["MLFLOW_TRACKING_URI"])
    assert found.stack is None


def test_a_stack_that_is_named_is_meant_and_so_is_the_default_one_where_nothing_is(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DropforgeError, match="it is not running"):
        connect(None)
    monkeypatch.setenv("DROPFORGE_BUCKET", "acme")
    assert stack_folder(Path(".dropforge")) == demo
    # As a command has it that has connected to a stack already.
    monkeypatch.setenv("DROPFORGE_STATE", str(demo))
    assert stack_folder(None) == demo
    with pytest.raises(DropforgeError, match="it is not running"):
        connect(None)
