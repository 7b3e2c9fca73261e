"""The trainer's image, built and started as a pod is: a read-only root, no rights, any user.

Its packages are those of this environment, mounted: an image with PyTorch has seven gigabytes. Build arguments in
DROPFORGE_TRAINER_BUILD make another variant, such as `VARIANT=gpu EFA=none NCCL_TESTS=none`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import ExitCode
from dropforge.store import open_store
from tests.images.built import ANYBODY, CONFINED, TORCH, Image, engine
from tests.images.dockerfile import VERSION
from tests.trainer.toy import Toy, sample_rows, write_dataset

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]

REVISION = uuid.uuid4().hex
"""Another one each time: no label may come from a cache."""
BUILD = dict(word.split("=", 1) for word in os.environ.get("DROPFORGE_TRAINER_BUILD", "VARIANT=mounted").split())
MOUNTED = BUILD.get("VARIANT") == "mounted"
OURS = {Path(sysconfig.get_path("purelib")): "/opt/dropforge/.venv/lib/python3.11/site-packages:ro"}
PACKAGES = OURS if MOUNTED else {}
WORDS = ("python", "-m", "trainer.launch")


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    built = Image.build("trainer", BUILD.get("VARIANT", "gpu"), **BUILD, REVISION=REVISION)
    yield built
    built.remove()


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    return Toy(str(bucket), write_dataset(open_store(str(bucket)), {"train": sample_rows(60), "eval": sample_rows(9)}))


@pytest.fixture
def pod(toy: Toy, tmp_path: Path) -> dict[str, Any]:
    """What Kubernetes gives: the bucket, the file of the termination message, shared memory."""
    (tmp_path / "termination").touch()
    mounts = {
        **(PACKAGES if MOUNTED else {}),
        Path(toy.root): toy.root,
        tmp_path / "termination": "/dev/termination-log",
    }
    return {"mounts": mounts, "env": {"PET_NPROC_PER_NODE": "1"}, "options": (*CONFINED, "--shm-size=64m")}


def open_to_all(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)


def until(container: str, words: str) -> None:
    """Wait for a line of its log."""
    deadline = time.monotonic() + 240
    while words not in engine("logs", container):
        assert time.monotonic() < deadline, engine("logs", container)
        assert engine("inspect", "-f", "{{.State.Running}}", container) == "true", engine("logs", container)
        time.sleep(0.2)


def test_the_image_says_what_it_is(image: Image) -> None:
    config = image.about["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert (labels["version"], labels["revision"]) == (VERSION, REVISION)
    told = image.run(
        "sh",
        "-c",
        # The operator's init container calls getent.
        "id -u; cat /proc/1/comm; g++ --version | head -n 1; cat sbom.cdx.json; "
        "test ! -e /opt/tools && command -v getent >/dev/null",
    )
    assert told.returncode == 0, told.stdout
    user, first, compiler, bom = told.stdout.split("\n", 3)
    assert (user, first) == ("10001", "tini")
    assert compiler.startswith("g++")
    assert json.loads(bom)["bomFormat"] == "CycloneDX"


@pytest.mark.parametrize("user", ["--user=10001:10001", ANYBODY])
def test_it_trains_with_a_read_only_root(
    image: Image, toy: Toy, pod: dict[str, Any], tmp_path: Path, user: str
) -> None:
    uri = toy.run("r")
    open_to_all(tmp_path)
    began = time.monotonic()
    container = image.start(*WORDS, uri, **{**pod, "options": (*pod["options"], user)})
    until(container, "[rank 0]")
    image.report("the first word of a rank", time.monotonic() - began, more=0 if MOUNTED else TORCH)
    assert engine("wait", container, timeout=280) == "0", engine("logs", container)
    report = json.loads(toy.files("r").get("report.json"))
    assert (report["status"], report["steps"]) == ("succeeded", 12)


def test_a_pod_that_shall_go_saves_and_says_so(image: Image, toy: Toy, pod: dict[str, Any], tmp_path: Path) -> None:
    uri = toy.run("r", train={"max_steps": 100_000, "checkpoint_every": 50_000})
    open_to_all(tmp_path)
    container = image.start(*WORDS, uri, **pod)
    until(container, "tok/s")
    engine("stop", "--time=60", container)
    assert engine("wait", container) == str(int(ExitCode.PREEMPTED)), engine("logs", container)
    assert json.loads((tmp_path / "termination").read_text())["exit_code"] == int(ExitCode.PREEMPTED)
    assert [info for info in toy.files("r").list("checkpoints/") if info.key.endswith("/manifest.json")]


def test_it_compiles_models(image: Image, pod: dict[str, Any]) -> None:
    program = "import torch; print(float(torch.compile(lambda x: (x * 2).sum())(torch.ones(8))))"
    done = image.run("python", "-c", program, **{**pod, "options": (*pod["options"], ANYBODY)})
    assert done.stdout.strip().endswith("16.0"), done.stdout


def test_a_wrong_command_line_ends_with_its_code(image: Image, pod: dict[str, Any]) -> None:
    done: subprocess.CompletedProcess[str] = image.run("python", "-m", "trainer", "nothing", **pod)
    assert done.returncode == 2
    assert os.linesep not in done.stdout.strip().splitlines()[-1]
    assert "invalid choice: 'nothing'" in done.stdout
