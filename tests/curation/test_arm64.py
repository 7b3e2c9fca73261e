"""The pods on arm64: each package has a wheel for it or is plain Python, at its pinned version if it has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
#: Extras by the pod that has them, and packages that are among what they need. Not `spark`: PySpark has no wheel at
#: all, its source is Python and Java, and to learn that takes a gigabyte.
PODS = {
    "curation": (("curation", "text"), {"pyarrow", "duckdb", "zstandard", "ftfy"}),
    "trainer": (("trainer", "quantised", "tensorboard"), {"torch", "tokenizers", "bitsandbytes", "tensorboard"}),
    "airflow": (("airflow", "hub"), {"apache-airflow", "kubernetes", "datasets"}),
}


@pytest.mark.skipif(not UV.is_file(), reason="this environment has no uv")
@pytest.mark.parametrize("pod", PODS)
def test_every_wheel_is_there_for_arm64(pod: str) -> None:
    named, needed = PODS[pod]
    links = [f"--find-links={link}" for link in os.environ.get("PIP_FIND_LINKS", "").split()]
    extras = [part for extra in named for part in ("--extra", extra)]
    command = [str(UV), "pip", "compile", "--quiet", "--python-platform", "aarch64-manylinux_2_28", *links, *extras]
    command += ["--python-version", "3.11", "--only-binary", ":all:"]
    command += ["--constraint", "requirements/dev.txt", "pyproject.toml"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.partition("==")[0] for line in done.stdout.splitlines() if "==" in line}
    assert needed <= found
