"""The pages on installing, typed as they are where one machine can: scripts stand for the cluster and for AWS."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.compose.server import page_commands
from tests.dropforge.install.test_plan import ROOT

PAGES = sorted((ROOT / "docs" / "how-to" / "install").glob("*.md"))
PODMAN = f'case "$1 $2" in "manifest push") echo sha256:{"d" * 64} >"$5" ;; "manifest rm") exit 1 ;; esac'
ADDRESS = f"r.example/team/dropforge-trainer@sha256:{'c' * 64}"


def give(commands: str, folder: Path) -> None:
    """Give commands in a folder where `kubectl` and `aws` keep what they are told, by their second to last word."""
    for name, told in (
        ("kubectl", "cat >>applied"),
        ("aws", 'case "$3" in -) cat >>empty ;; *) cat "$3" >>uploaded ;; esac'),
    ):
        (folder / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >>told\ncase "$*" in *" - "*|*" -"|*cp*) {told} ;; esac\n'
        )
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=folder, env=env, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_typed_is_a_shell_script(page: Path) -> None:
    blocks = re.findall(r"(?:^    .*\n)+", page.read_text(), re.MULTILINE)
    script = "".join(re.sub("^    ", "", block, flags=re.MULTILINE) for block in blocks)
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_gpu_pod_has_the_image_that_was_pushed(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "images.lock").write_text(json.dumps({"trainer": ADDRESS}))
    (commands,) = page_commands("kubernetes.md", "3. GPUs and a shared filesystem")
    give(commands, tmp_path)
    pod = yaml.safe_load((tmp_path / "applied").read_text())
    assert [one["image"] for one in pod["spec"]["containers"]] == [ADDRESS]
    told = (tmp_path / "told").read_text()
    assert f"logs --namespace training --follow {pod['metadata']['name']}" in told


def test_the_first_drop_has_rows_and_its_last_object(tmp_path: Path) -> None:
    (commands,) = page_commands("kubernetes.md", "4. The first run")
    give(commands, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "uploaded").read_text().splitlines()]
    assert len(rows) == 400
    assert rows[7] == {"question": "What is 8 + 8?", "answer": "8 + 8 is twice 8."}
    uploads = re.findall(r"aws s3 cp \S+ (\S+)", (tmp_path / "told").read_text())
    assert [key.rpartition("/")[2] for key in uploads] == ["rows.jsonl", "_SUCCESS"]
    assert len({key.rpartition("/")[0] for key in uploads}) == 1
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize(
    ("page", "headings"), [("kubernetes.md", ("1. Images", "2. The plan")), ("kubernetes-upgrade.md", ("Upgrade",))]
)
def test_images_are_pushed_and_the_plan_names_them_by_their_digests(
    page: str, headings: tuple[str, ...], tmp_path: Path
) -> None:
    first, *later = (page_commands(page, heading)[0] for heading in headings)
    for name, script in (("docker", "exit 1"), ("podman", PODMAN)):  # the first has no buildx
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "-euc", "\n".join([first, *later])], cwd=tmp_path, env=env, check=True, capture_output=True)
    plan = (tmp_path / "plan.sh").read_text()
    for name in ("AIRFLOW", "CURATION", "MLFLOW", "TRAINER"):
        (address,) = re.findall(rf"^{name}_IMAGE=(\S+)", plan, re.MULTILINE)
        assert address == f"registry.example/team/dropforge-{name.lower()}@sha256:{'d' * 64}"
    assert re.search("^BUCKET=acme-dropforge\\b", plan, re.MULTILINE)
