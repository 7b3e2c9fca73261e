"""What images are called, and the commands that build and push them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dropforge import images
from dropforge.errors import DropforgeError
from dropforge.images import Registry

AMAZON = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"
DIGEST = "sha256:" + "a" * 64


def test_names_begin_with_the_registry() -> None:
    plain = Registry.parse("registry.example:5000/team/ml")
    assert plain.reference("trainer", "0.1.0") == "registry.example:5000/team/ml/dropforge-trainer:0.1.0"
    assert plain.ecr_region is None
    assert Registry.parse(AMAZON).repository("mlflow") == "dropforge-mlflow"
    assert Registry.parse(AMAZON).ecr_region == "eu-central-1"
    assert Registry.parse("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/a").ecr_region == "cn-north-1"
    # Who owns another domain gets no token of Amazon's.
    assert Registry.parse(f"{AMAZON}.evil.example").ecr_region is None
    assert Registry.parse(f"evil.example/{AMAZON}").ecr_region is None


@pytest.mark.parametrize(
    "text",
    ["", "https://registry.example", "user:pw@registry.example", "-o", "Registry.example/A", "a b", "a//b", "a/../b"],
)
def test_what_is_no_registry_is_refused(text: str) -> None:
    with pytest.raises(DropforgeError, match="it is no address of a registry"):
        Registry.parse(text)


@pytest.mark.parametrize("tag", ["latest", "", "-x", "a b", "a:b", "x" * 129])
def test_a_tag_that_moves_or_is_none_is_refused(tag: str) -> None:
    with pytest.raises(DropforgeError, match="it is no tag that stays"):
        Registry.parse("registry.example").reference("trainer", tag)


def test_a_secret_is_no_build_argument() -> None:
    images.check_arguments({"VARIANT": "cpu", "BASE": "python:3.11.14-slim-bookworm"})
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "pip_password"):
        with pytest.raises(DropforgeError, match=f"build argument {name}: it looks like a secret"):
            images.check_arguments({name: "x"})


def test_podman_and_buildah_make_a_list_anew_and_push_it_whole(tmp_path: Path) -> None:
    made = images.build("buildah", "trainer", "r/t:1", images.PLATFORMS, {"VARIANT": "cpu"})
    assert made == [
        ["buildah", "manifest", "rm", "r/t:1"],
        ["buildah", "build", "--platform", "linux/amd64,linux/arm64", "--build-arg", "VARIANT=cpu", "--file",
         "images/trainer/Dockerfile", "--manifest", "r/t:1", "."],
    ]  # fmt: skip
    told = tmp_path / "told"
    assert images.push("podman", "r/t:1", told) == [
        ["podman", "manifest", "push", "--all", "--digestfile", str(told), "r/t:1", "docker://r/t:1"]
    ]


def test_docker_pushes_as_it_builds(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (built,) = images.build("docker", "mlflow", "r/m:1", ["linux/arm64"], {}, told)
    assert built[:3] == ["docker", "buildx", "build"]
    assert built[-4:] == ["--push", "--metadata-file", str(told), "."]
    (kept,) = images.build("docker", "mlflow", "r/m:1", ["linux/arm64"], {})
    assert kept[-2:] == ["--load", "."]
    assert "--push" not in kept
    assert "--load" not in images.build("docker", "mlflow", "r/m:1", images.PLATFORMS, {})[0]
    assert images.push("docker", "r/m:1", told) == []


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "amd64"), ("AMD64", "amd64"), ("aarch64", "arm64"), ("arm64", "arm64")]
)
def test_machines_have_names_of_the_engines_platforms(machine: str, name: str) -> None:
    assert images.platform_of(machine) == f"linux/{name}"


def test_the_digest_is_read_or_missed() -> None:
    assert images.digest("podman", f"{DIGEST}\n") == DIGEST
    assert images.digest("docker", json.dumps({"containerimage.digest": DIGEST})) == DIGEST
    for engine, told in (("podman", ""), ("docker", "{}"), ("docker", "["), ("buildah", "sha256:abc")):
        with pytest.raises(DropforgeError, match="it left no digest"):
            images.digest(engine, told)  # type: ignore[arg-type]


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    lock, there = tmp_path / "images.lock", {"trainer": f"r/t@{DIGEST}", "mlflow": "r/m@old"}
    assert images.read_lock(lock) == {}
    lock.write_text(images.locked(there))
    assert images.read_lock(lock) == there
    for broken in (b"[]", b"{", b"[" * 100_000, b"\xff{"):
        lock.write_bytes(broken)
        with pytest.raises(DropforgeError, match=r"images\.lock: it cannot be read"):
            images.read_lock(lock)


def test_a_lock_that_is_no_file_or_has_no_end_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "images.lock"
    os.mkfifo(lock)
    with pytest.raises(DropforgeError, match=r"images\.lock: it is no file"):
        images.read_lock(lock)
    lock.unlink()
    lock.symlink_to("/dev/zero")
    with pytest.raises(DropforgeError, match=r"images\.lock: it is no file"):
        images.read_lock(lock)
    lock.unlink()
    with lock.open("wb") as stream:
        stream.truncate(2 << 20)
    with pytest.raises(DropforgeError, match=r"images\.lock: it has more than"):
        images.read_lock(lock)


def test_build_arguments_are_those_that_a_dockerfile_declares() -> None:
    assert images.declared("ARG BASE=a:1\nFROM x\nARG CUDA=1 NCCL=2\nARG REVISION=\n") == {
        "BASE", "CUDA", "NCCL", "REVISION",
    }  # fmt: skip


def test_what_chooses_a_stage_is_given_to_the_build() -> None:
    dockerfile = "ARG BASE=a:1\nARG VARIANT=gpu\nFROM x\nARG CUDA=1 NCCL=2\nFROM p-${VARIANT}\nARG REVISION=\n"
    assert images.defaults(dockerfile) == {"BASE": "a:1", "VARIANT": "gpu"}
