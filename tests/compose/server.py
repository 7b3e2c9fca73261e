"""A server of docker-compose.yaml, brought up by the tool that DROPFORGE_COMPOSE names, under a name of its own.

The tool has to name containers as podman-compose does (`PROJECT_SERVICE_1`; Docker's are `PROJECT-SERVICE-1`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.images.dockerfile import REPOSITORY

TOOL = os.environ.get("DROPFORGE_COMPOSE", "")
ENGINE = next((found for name in ("podman", "docker") if (found := shutil.which(name))), "")
ENV_SCRIPT = REPOSITORY / "images" / "compose-env.sh"
PROJECT = "dropforge-test"
T = TypeVar("T")


def make_env(path: Path) -> dict[str, str]:
    """What images/compose-env.sh leaves in a file."""
    subprocess.run(["sh", str(ENV_SCRIPT), str(path)], check=True, capture_output=True)
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))


class Server:
    """
    :param folder: for the file of secrets.
    :param site_packages: what the trainer's container has in place of packages of its own.
    """

    def __init__(self, folder: Path, site_packages: Path) -> None:
        if not TOOL or not shutil.which(TOOL):
            pytest.skip("DROPFORGE_COMPOSE names no tool that brings compose files up")
        if not ENGINE:
            pytest.skip("there is neither Podman nor Docker")
        self.site_packages = site_packages
        self.env_file = folder / ".env"
        self.secrets = make_env(self.env_file)
        self.ports = {name: _free_port() for name in ("AIRFLOW_PORT", "MLFLOW_PORT", "S3_PORT")}
        more = {**self.ports, "TRAINER_VARIANT": "mounted", "SITE_PACKAGES": site_packages}
        with self.env_file.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in more.items())

    @property
    def tool(self) -> list[str]:
        """The tool, for this server."""
        names = ("docker-compose.yaml", "images/objects/published.yaml", "tests/compose/mounted.yaml")
        files = [word for name in names for word in ("-f", str(REPOSITORY / name))]
        return [*TOOL.split(), "-p", PROJECT, "--env-file", str(self.env_file), *files]

    def compose(self, *words: str, timeout: float = 1500) -> str:
        """What the tool says."""
        return self._printed([*self.tool, *words], timeout)

    def type(self, commands: str, folder: Path, timeout: float = 600) -> str:
        """What a page's commands print in a folder, where `docker` is this server's tool and engine."""
        typed = folder / "bin" / "docker"
        typed.parent.mkdir(exist_ok=True)
        run = "run --ulimit=host" if ENGINE.endswith("podman") else "run"
        typed.write_text(
            f"""#!/bin/sh
case $1 in
compose) shift; exec {shlex.join(self.tool)} "$@" ;;
run) shift; exec {ENGINE} {run} "$@" ;;
*) exec {ENGINE} "$@" ;;
esac
"""
        )
        typed.chmod(0o700)
        env = {**os.environ, "PATH": f"{typed.parent}:{os.environ['PATH']}"}
        return self._printed(["sh", "-ec", commands], timeout, cwd=folder, env=env, stdin=subprocess.DEVNULL)

    def _printed(self, command: list[str], timeout: float, **more: Any) -> str:
        """What a command prints that has to succeed. :param more: as of `subprocess.run`."""
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            **more,
        )
        assert done.returncode == 0, self.without_secrets(done.stdout[-5000:])
        return done.stdout

    def without_secrets(self, text: str) -> str:
        for name, value in self.secrets.items():
            text = text.replace(value, f"<{name}>") if len(value) > 8 else text
        return text

    @property
    def client_env(self) -> dict[str, str]:
        """The environment of a user on this machine, as docs/how-to/install/docker-compose.md gives it."""
        objects = f"http://127.0.0.1:{self.ports['S3_PORT']}"
        return {
            "DROPFORGE_STATE": str(self.env_file.parent / "none"),
            "DROPFORGE_BUCKET": "dropforge",
            "DROPFORGE_AIRFLOW_URL": f"http://127.0.0.1:{self.ports['AIRFLOW_PORT']}",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['MLFLOW_PORT']}",
            "AIRFLOW_USERNAME": "admin",
            "AIRFLOW_PASSWORD": self.secrets["AIRFLOW_ADMIN_PASSWORD"],
            "MLFLOW_TRACKING_USERNAME": "admin",
            "MLFLOW_TRACKING_PASSWORD": self.secrets["MLFLOW_ADMIN_PASSWORD"],
            "AWS_ENDPOINT_URL": objects,
            "AWS_ACCESS_KEY_ID": self.secrets["S3_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": self.secrets["S3_SECRET_KEY"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fetch_images(self) -> None:
        """Those that nobody builds here: for a container without its image Podman's compose would wait for ever."""
        services = yaml.safe_load((REPOSITORY / "docker-compose.yaml").read_text())["services"].values()
        images = {service["image"] for service in services}
        for image in sorted(image for image in images if "dropforge-" not in image):
            if subprocess.run([ENGINE, "image", "inspect", image], capture_output=True).returncode:
                try:
                    engine("pull", image)
                except OSError as error:
                    pytest.fail(f"image {image}: it is not here and cannot be pulled ({error}). Pull or make it first")

    def remove(self) -> None:
        """With all that it has kept, also what came back from a backup."""
        self.compose("down", "--volumes")
        volumes = engine("volume", "ls", "--format", "{{.Name}}").splitlines()
        assert not (left := [name for name in volumes if name.startswith(f"{PROJECT}_")]), left

    def services(self) -> list[str]:
        """Those that stay."""
        found = engine("ps", "--format", "{{.Names}}").splitlines()
        return sorted(name.split("_", 1)[1].rsplit("_", 1)[0] for name in found if name.startswith(f"{PROJECT}_"))

    def container(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def logs(self, service: str) -> str:
        return engine("logs", self.container(service))

    def inspect(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(engine("inspect", self.container(service)))[0]
        return found

    @contextmanager
    def serving(self, model: str, env: Mapping[str, str]) -> Iterator[str]:
        """`mlflow models serve` of a registered model in MLflow's image, with this machine's packages; its address.

        :param env: how the container reaches MLflow and S3.
        """
        port, name = _free_port(), f"{PROJECT}-serving"
        networks = self.inspect("mlflow")["NetworkSettings"]["Networks"]
        words = [
            "run",
            "--detach",
            "--name",
            name,
            "--network",
            next(iter(networks)),
            f"--publish=127.0.0.1:{port}:5000",
        ]
        words += ["--ulimit=host"] if ENGINE.endswith("podman") else []
        packages = f"{self.site_packages}:/opt/mlflow/.venv/lib/python3.11/site-packages:ro"
        words += ["--volume", packages, *(f"--env={key}" for key in env), self.inspect("mlflow")["Image"]]
        words += f"mlflow models serve -m models:/{model} --env-manager local --host 0.0.0.0 --port 5000".split()
        self._printed([ENGINE, *words], 120, env={**os.environ, **env})
        try:
            address = f"http://127.0.0.1:{port}"
            self.until(lambda: _answers(f"{address}/ping"), lambda: engine("logs", name)[-3000:], 180)
            yield address
        finally:
            engine("rm", "--force", name)

    def kill(self, service: str) -> None:
        """SIGKILL to its first process, as if it had died: the engine does not know that somebody wanted it."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)

    def healthy(self, service: str) -> bool:
        """What the service's own check says now."""
        if ENGINE.endswith("podman"):
            done = subprocess.run([ENGINE, "healthcheck", "run", self.container(service)], capture_output=True)
            return done.returncode == 0
        return bool(self.inspect(service)["State"]["Health"]["Status"] == "healthy")

    def until(self, what: Callable[[], T | None], why: str | Callable[[], str], seconds: float) -> T:
        """The first true value; what cannot be reached yet is asked again. :param why: what is waited for."""
        end = time.monotonic() + seconds
        while True:
            try:
                found = what()
            except (OSError, ValueError):
                found = None
            if found:
                return found
            if time.monotonic() > end:
                tails = "\n".join(f"== {name}\n{self.logs(name)[-1500:]}" for name in self.services())
                told = why if isinstance(why, str) else why()
                raise AssertionError(f"waited {seconds:g} s in vain: {told}\n{self.without_secrets(tails)}")
            time.sleep(0.5)

    def airflow_health(self) -> dict[str, Any]:
        """What Airflow says of its parts. :raises OSError: if nobody answers, or with an error."""
        return fetch(f"{self.client_env['DROPFORGE_AIRFLOW_URL']}/api/v2/monitor/health")

    def wait_until_ready(self, seconds: float = 300) -> None:
        lacking = ["all"]

        def ready() -> bool:
            lacking[:] = [service for service in WANTED if not self.healthy(service)]
            health = self.airflow_health()
            parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
            lacking.extend(f"Airflow's {part}" for part in parts if health[part]["status"] != "healthy")
            return not lacking

        self.until(ready, lambda: f"every service is healthy, but for {', '.join(lacking)}", seconds)


def page_commands(page: str, heading: str) -> list[str]:
    """The blocks of commands below a heading of a page on installing."""
    text = (REPOSITORY / "docs/how-to/install" / page).read_text()
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [
        re.sub("^    ", "", block, flags=re.MULTILINE) for block in re.findall(r"(?:^    .*\n)+", part, re.MULTILINE)
    ]


WANTED = (
    "postgres", "objects", "mlflow", "airflow-api", "airflow-scheduler", "airflow-triggerer", "airflow-dag-processor",
    "trainer",
)  # fmt: skip


def fetch(url: str) -> dict[str, Any]:
    """:raises OSError: if nobody answers, or with an error."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _answers(url: str) -> bool:
    """:raises OSError: if nobody does, or with an error."""
    with urllib.request.urlopen(url, timeout=5):
        return True


def engine(*words: str, timeout: float = 120) -> str:
    """What the engine answers."""
    done = subprocess.run(
        [ENGINE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    if done.returncode:
        raise OSError(done.stdout)
    return done.stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
