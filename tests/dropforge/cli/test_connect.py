"""Which services a command speaks to: those of a folder that was named, of the environment, of the default folder."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dropforge import __version__
from dropforge.cli.app import app
from dropforge.cli.services import show_addresses
from dropforge.client.connection import connect, stack_folder
from dropforge.errors import DropforgeError
from dropforge.stack.processes import Traces
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import ServiceState, StackState, lock_path, mark_path, read_state, write_state
from dropforge.store import s3_client
from dropforge.terminal import Console

SERVER = {
    "DROPFORGE_BUCKET": "acme",
    "MLFLOW_TRACKING_URI": "http://mlflow.acme.example",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The default folder, with a stack that was stopped; who connects to one has its settings in the environment."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    for name in ("DROPFORGE_STATE", *SERVER):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / ".dropforge"
    secrets, traces = read_secrets(folder), Traces("boot", "id", mark_path(folder), frozenset())
    ports = {"airflow": 1, "mlflow": 1, "objects": 1}
    write_state(StackState(folder, "stopped", ports, {}, (1, 0), traces, time.time(), secrets))
    yield folder
    os.environ.clear()
    os.environ.update(before)


def test_links_of_airflow_lead_where_a_browser_gets_to(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container its server has another address than for people."""
    for name, value in {**SERVER, "DROPFORGE_AIRFLOW_URL": "http://airflow-api:8080"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AIRFLOW__API__BASE_URL", raising=False)
    assert connect(None).airflow.page("d", "r") == "http://airflow-api:8080/dags/d/runs/r"
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.acme.example/")
    airflow = connect(None).airflow
    assert (airflow.url, airflow.page("d", "r")) == (
        "http://airflow-api:8080",
        "https://airflow.acme.example/dags/d/runs/r",
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_a_password_is_shown_in_a_terminal_and_in_no_log(demo: Path, terminal: bool) -> None:
    state = read_state(demo)
    assert state is not None
    out = io.StringIO()
    show_addresses(state, Console(file=out, force_terminal=terminal, width=400))
    assert (state.secrets.airflow_password in out.getvalue()) == terminal
    assert (state.secrets.mlflow_password in out.getvalue()) == terminal
    for name in ("airflow_password", "mlflow_password"):  # of the ten that the file has
        assert (f"{name} of {demo / 'secrets.json'}" in out.getvalue()) != terminal


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


@pytest.mark.parametrize(
    "theirs", [{"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, {"AWS_PROFILE": "of-another-machine"}]
)
def test_a_shell_s_settings_of_aws_do_not_lead_away_from_the_stack(
    demo: Path, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str]
) -> None:
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    state = read_state(demo)
    assert state is not None
    write_state(replace(state, phase="ready"))
    with lock_path(demo).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        printed = CliRunner().invoke(app, ["env"]).output
        connect(demo)
        assert s3_client().meta.endpoint_url == "http://127.0.0.1:1"
    [unset, *_] = printed.splitlines()
    assert theirs.keys() <= set(unset.removeprefix("unset ").split())


def test_without_a_stack_or_services_a_command_says_that_none_is_running(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.acme.example")  # which people have set for other reasons
    with pytest.raises(DropforgeError, match=r"stack in .*/other: it is not running. .*--state.*DROPFORGE_BUCKET"):
        connect(demo.parent / "other")


def test_status_tells_the_pages_and_what_is_not_healthy(demo: Path) -> None:
    done = CliRunner().invoke(app, ["status"])
    assert (done.exit_code, "No stack is running" in done.output) == (1, True)
    state = read_state(demo)
    assert state is not None
    services = {"mlflow": ServiceState("healthy"), "scheduler": ServiceState("failing", message="no heartbeat")}
    with lock_path(demo).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_state(replace(state, phase="degraded", services=services, readable="hub:* /models/"))
        done = CliRunner().invoke(app, ["status"])
        assert done.exit_code == 1
        for said in (
            state.settings.airflow_url,
            state.settings.tracking_uri,
            "failing",
            "no heartbeat",
            "hub:* /models/",
        ):
            assert said in done.output
        write_state(replace(state, phase="ready", services={"mlflow": ServiceState("healthy")}))
        assert CliRunner().invoke(app, ["status"]).exit_code == 0


def test_plan_refuses_what_the_running_stack_does_not_let_be_read(demo: Path) -> None:
    state = read_state(demo)
    assert state is not None
    recipe = demo.parent / "recipe.yaml"
    recipe.write_text(f"extends: lora\nbase: {{model: {demo.parent}/models/small}}\n")

    def plan(readable: str) -> str:
        write_state(replace(state, phase="ready", readable=readable))
        return str(CliRunner().invoke(app, ["plan", str(recipe)]).exception)

    assert plan("") == "None"  # nothing runs here: whose rules hold is not known
    with lock_path(demo).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "May be read: bucket dropforge" in plan("")
        assert plan(f"hub:* {demo.parent}/models/") == "None"


@pytest.mark.parametrize(
    ("page", "url"), [("airflow", "http://airflow.acme.example"), ("mlflow", SERVER["MLFLOW_TRACKING_URI"])]
)
def test_open_starts_a_browser(demo: Path, monkeypatch: pytest.MonkeyPatch, page: str, url: str) -> None:
    for name, value in {**SERVER, "DROPFORGE_AIRFLOW_URL": "http://airflow.acme.example"}.items():
        monkeypatch.setenv(name, value)
    note = demo.parent / "opened"
    browser = demo.parent / "browser"
    browser.write_text(f"#!{sys.executable}\nimport sys\nopen({str(note)!r}, 'w').write(sys.argv[1])\n")
    browser.chmod(0o755)
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # it is found once per process
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    done = CliRunner().invoke(app, ["open", page])
    assert (done.exit_code, done.output.strip(), note.read_text()) == (0, url, url)


def test_open_says_which_address_is_missing(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DROPFORGE_AIRFLOW_URL", raising=False)
    done = CliRunner().invoke(app, ["open", "airflow"])
    assert "DROPFORGE_AIRFLOW_URL: it is not set" in str(done.exception)


def test_the_version_is_shown() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"dropforge {__version__}\n")


def test_a_plugin_of_the_kubeconfig_keeps_the_callers_credentials(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = '{"users": [{"name": "u", "user": {"exec": {"command": "aws", "args": ["eks", "get-token"]}}}]}'
    (demo / "mine").write_text(users)
    monkeypatch.setenv("KUBECONFIG", str(demo / "mine"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_PROFILE", "my-profile")  # which would lead the command itself away from the stack
    monkeypatch.setattr("dropforge.client.connection.running_stack", lambda folder, mend: read_state(folder))
    for _ in range(2):  # commands connect as often as they like
        connect(demo)
        assert os.environ["AWS_ACCESS_KEY_ID"] != "mine"
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["KUBECONFIG"] == f"{demo / 'kubeconfig-client'}:{demo / 'mine'}"
        kept = json.dumps(yaml.safe_load((demo / "kubeconfig-client").read_text()))
        assert '"mine"' in kept
        assert '"my-profile"' in kept
