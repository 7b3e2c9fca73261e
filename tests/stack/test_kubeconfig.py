"""A kubeconfig's plugin gets the cloud credentials of whoever started the stack, and not those of the embedded S3."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dropforge.stack.kubeconfig import kubeconfig_env
from dropforge.stack.secrets import Secrets
from dropforge.stack.services import services

OWN = {"AWS_ACCESS_KEY_ID": "embedded", "AWS_SECRET_ACCESS_KEY": "embedded", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
PLUGIN = """#!/bin/sh
env | grep ^AWS_ >{told}
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {{"token": "t"}}}}'
"""
ASYNC = """
import asyncio
from kubeflow_training.jobs.kubernetes.client import from_kubeconfig

async def main():
    async with from_kubeconfig() as client:
        print(client.configuration.host)

asyncio.run(main())
"""
SYNC = "from kubernetes import config; print(config.new_client_from_config().configuration.host)"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a kubeconfig whose plugin is beside it, as relative paths allow, and tells what it got."""
    plugin = tmp_path / "plugins" / "token"
    plugin.parent.mkdir()
    plugin.write_text(PLUGIN.format(told=tmp_path / "told"))
    plugin.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    said = [{"name": "AWS_STS_REGIONAL_ENDPOINTS", "value": "regional"}]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://cluster.example"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [
            {
                "name": "u",
                "user": {
                    "exec": {
                        "apiVersion": version,
                        "command": "plugins/token",
                        "args": ["eks"],
                        "env": said,
                        "interactiveMode": "Never",
                    }
                },
            }
        ],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.parametrize("program", [SYNC, ASYNC], ids=["client", "asyncio"])
@pytest.mark.parametrize(
    "keys", [{}, {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "mine2"}], ids=["profile", "keys"]
)
def test_the_plugin_gets_the_callers_credentials(home: Path, keys: dict[str, str], program: str) -> None:
    caller = {"KUBECONFIG": str(home / "config"), "AWS_PROFILE": "work", **keys}
    more = kubeconfig_env(home / "kubeconfig", caller, OWN)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **OWN, **more}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == "https://cluster.example", done.stderr
    told = dict(line.split("=", 1) for line in (home / "told").read_text().splitlines())
    assert told == {"AWS_PROFILE": "work", "AWS_STS_REGIONAL_ENDPOINTS": "regional", **keys}
    assert stat.S_IMODE((home / "kubeconfig").stat().st_mode) == 0o600


def test_what_the_shell_has_of_the_stack_is_not_the_callers(home: Path) -> None:
    """As after `eval "$(dropforge env)"`."""
    kubeconfig_env(home / "kubeconfig", {"KUBECONFIG": str(home / "config"), **OWN}, OWN)
    assert "embedded" not in (home / "kubeconfig").read_text()


@pytest.mark.parametrize("text", ["", "users: 3", "users: [{name: u, user: {token: t}}]", "a: [", "\x00"])
def test_a_file_without_a_plugin_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    caller = {"KUBECONFIG": f"{tmp_path / 'config'}:{tmp_path / 'none'}"}
    assert kubeconfig_env(tmp_path / "kubeconfig", caller, OWN) == {}
    assert not (tmp_path / "kubeconfig").exists()


def test_the_stacks_services_have_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(home / "config"))
    ports = {"objects": 1, "mlflow": 2, "airflow": 3, "postgres": 4}
    for service in services(home, ports, Secrets()):
        assert service.env["KUBECONFIG"].startswith(str(home / "kubeconfig"))
    (user,) = yaml.safe_load((home / "kubeconfig").read_text())["users"]
    assert user["user"]["exec"]["command"] == "env"
    assert "AWS_ENDPOINT_URL" in json.dumps(user["user"]["exec"]["args"])
