"""The pages on Kubernetes, typed as they are where one machine can, against a real API server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.install.steps import STEPS
from tests.cluster.conftest import REPOSITORY, kubectl
from tests.cluster.team_place import applied
from tests.cluster.test_install import ADDRESS, dry_run, kinds_of, namespaces, printed, served
from tests.compose.server import page_commands

pytestmark = [pytest.mark.cluster, pytest.mark.outage, pytest.mark.timeout(600)]

PAGES = REPOSITORY / "docs" / "how-to" / "install"
__all__ = ["namespaces"]


def typed(commands: str, folder: Path) -> None:
    """Give commands in a clone's folder, where `dropforge` is on the PATH."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"


def read(*words: str) -> Any:
    """:raises AssertionError: if it is not there."""
    done = kubectl("get", *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone's folder after `dropforge images push`."""
    for name in ("docs", "helm-values"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "images.lock").write_text(json.dumps({"airflow": ADDRESS, "trainer": ADDRESS}))
    shutil.copy(REPOSITORY / "helm-values" / "trainer.env", tmp_path)
    return tmp_path


def test_the_pages_lead_from_rights_to_pods_and_back_to_nothing(clone: Path) -> None:
    objects = list(yaml.safe_load_all(printed_by("install", "--size", "team", "--namespace", "training", folder=clone)))
    (whole,) = page_commands("kubernetes-special-cases.md", "Charts that something else installs")
    with served(kinds_of("watching")):
        applied("create", "namespace", "monitoring")
        try:
            typed(whole, clone)
            for one in objects:
                read(*place_of(one))
            in_use(clone)
            removed(clone)
            left = [one for one in objects if kubectl("get", *place_of(one)).returncode == 0]
            assert {one["metadata"].get("namespace") for one in left} <= {"monitoring"}
        finally:
            applied("delete", "--ignore-not-found", "namespace", "monitoring", "airflow", "training")


def in_use(clone: Path) -> None:
    """The team's queue, a pull secret, the secret of trainings, the first pod with a GPU, and a restart."""
    kueue = next(step for step in STEPS if step.name == "kueue")
    typed("\n".join(["TRAINING=training", *kueue.after]), clone)
    queue = read("localqueues.kueue.x-k8s.io", "training", "-n", "training")["spec"]["clusterQueue"]
    assert queue in {
        one["metadata"]["name"]
        for one in yaml.safe_load_all(printed_by("queues", "render", "teams.yaml", folder=clone))
    }
    _push, pull = page_commands("kubernetes.md", "1. Images")
    typed(pull, clone)
    assert read("serviceaccount", "dropforge-trainer", "-n", "training")["imagePullSecrets"] == [{"name": "NAME"}]
    secret, *_ = page_commands("kubernetes-special-cases.md", "No queue, no roles for pods")
    typed(secret, clone)
    assert read("secret", "dropforge-trainer", "-n", "training")["data"].keys() == {"MLFLOW_TRACKING_URI"}
    (first,) = page_commands("kubernetes.md", "3. GPUs and a shared filesystem")
    typed(first.partition("kubectl logs")[0], clone)
    pod = read("pod", "gpu-pod", "-n", "training")["spec"]
    assert [one["image"] for one in pod["containers"]] == [ADDRESS]
    assert pod["imagePullSecrets"] == [{"name": "NAME"}]
    _again, restart = page_commands("kubernetes-upgrade.md", "Upgrade")
    typed(restart, clone)
    for one in read("deployment", "-n", "airflow")["items"]:
        assert "kubectl.kubernetes.io/restartedAt" in one["spec"]["template"]["metadata"]["annotations"]


def removed(clone: Path) -> None:
    """What the page on removal says, without the releases of charts, of which there are none."""
    first, _charts = page_commands("kubernetes-upgrade.md", "Removal")
    releases, *lines = first.splitlines()
    assert releases.startswith("for release in airflow mlflow; do helm uninstall")
    typed("\n".join(lines), clone)


def printed_by(*words: str, folder: Path) -> str:
    command = [str(Path(sys.executable).parent / "dropforge"), *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


def place_of(one: dict[str, Any]) -> list[str]:
    """An object, as `kubectl get` is told."""
    group = one["apiVersion"].rpartition("/")[0]
    where = one["metadata"].get("namespace")
    kind = f"{one['kind']}.{group}" if group else one["kind"]
    return [kind, one["metadata"]["name"], *(["--namespace", where] if where else [])]


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(PAGES.glob("*.md"))
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    if block.startswith("apiVersion")
]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("block", BLOCKS)
def test_manifests_on_pages_pass_the_api_server(block: str) -> None:
    assert kubectl("apply", "-f", "-", feed=printed("rights")).returncode == 0
    done = dry_run(block)
    assert done.returncode == 0, done.stderr
