"""Images built by the tool that DROPFORGE_IMAGE_BUILDER names, and containers of them.

The tool is called as `TOOL DOCKERFILE CONTEXT NAME --build-arg KEY=VALUE ...`; what it built, Podman or Docker starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.images.dockerfile import REPOSITORY

BUILDER = os.environ.get("DROPFORGE_IMAGE_BUILDER", "")
ENGINE = next((found for name in ("podman", "docker") if (found := shutil.which(name))), "")
LARGEST = {"airflow": 2200, "curation": 2500, "mlflow": 1600, "objects": 1000, "stack": 9000, "trainer": 1000}
TORCH = 7000
"""Megabytes that an image may have, and those that PyTorch for GPUs may add to the trainer's."""
# As the strictest cluster starts a pod.
CONFINED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none", "--tmpfs=/tmp")


ANYBODY = "--user=23456:0"
"""A user that no image knows, as OpenShift chooses one for each namespace."""


@dataclass
class Image:
    """An image of this test's own.

    :param seconds: how long the build took.
    """

    name: str
    seconds: float
    containers: list[str] = field(default_factory=list)

    @classmethod
    def build(cls, service: str, tag: str, **arguments: str) -> Image:
        """:param arguments: of the build."""
        if not BUILDER:
            pytest.skip("DROPFORGE_IMAGE_BUILDER names no tool that builds images")
        if not ENGINE:
            pytest.skip("there is neither Podman nor Docker to start an image")
        name = f"test.local/dropforge-{service}:{tag}"
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        began = time.monotonic()
        done = subprocess.run(
            [BUILDER, f"images/{service}/Dockerfile", ".", name, *given],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return cls(name, time.monotonic() - began)

    @property
    def about(self) -> dict[str, Any]:
        """What the engine knows of it."""
        done = subprocess.run([ENGINE, "image", "inspect", self.name], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def report(self, what: str, seconds: float, *, more: int = 0) -> None:
        """Print size and times, and hold the size to its bound. :param more: megabytes that this variant adds to it."""
        size = self.about["Size"] / 1e6
        print(f"\n{self.name}: {size:.0f} MB, built in {self.seconds:.0f} s, {what} after {seconds:.1f} s")
        assert size < LARGEST[self.name.partition("dropforge-")[2].partition(":")[0]] + more

    def run(
        self,
        *command: str,
        mounts: Mapping[Path, str] | None = None,
        env: Mapping[str, str] | None = None,
        options: tuple[str, ...] = CONFINED,
    ) -> subprocess.CompletedProcess[str]:
        """A container from its start to its end."""
        return subprocess.run(
            [ENGINE, "run", "--rm", *self._options(mounts, env, options), self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )

    def start(
        self,
        *command: str,
        mounts: Mapping[Path, str] | None = None,
        env: Mapping[str, str] | None = None,
        options: tuple[str, ...] = CONFINED,
    ) -> str:
        """A container that goes on; its id."""
        done = subprocess.run(
            [ENGINE, "run", "--detach", *self._options(mounts, env, options), self.name, *command],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        self.containers.append(done.stdout.strip())
        return self.containers[-1]

    def remove(self) -> None:
        """With its containers; the layers stay for the next build."""
        for container in self.containers:
            subprocess.run([ENGINE, "rm", "--force", "--volumes", container], capture_output=True)

    @staticmethod
    def _options(
        mounts: Mapping[Path, str] | None, env: Mapping[str, str] | None, options: tuple[str, ...]
    ) -> list[str]:
        found = [*options, *([] if ENGINE.endswith("docker") else ["--ulimit=host"])]
        found += [f"--volume={path}:{where}" for path, where in (mounts or {}).items()]
        return found + [f"--env={key}={value}" for key, value in (env or {}).items()]


def engine(*words: str, timeout: float = 120) -> str:
    """What the engine answers."""
    done = subprocess.run(
        [ENGINE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()
