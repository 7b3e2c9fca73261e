"""`dropforge bench network` over the cluster's own network: two pods, with the tasks' account, no other rights, and
none of a training's secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import IMAGE, REPOSITORY, Namespace, opened, preset
from tests.e2e.harness import wait

pytestmark = pytest.mark.cluster


@pytest.fixture
def namespace(machine_node: Any, tmp_path: Path) -> Iterator[Namespace]:
    """One without a stack's secret."""
    folder = tmp_path / "rights"
    folder.mkdir()
    with opened(machine_node, folder, machine="/") as made:
        yield made


def test_two_pods_measure_and_nothing_of_them_stays(namespace: Namespace, tmp_path: Path) -> None:
    asked = preset(namespace.name)
    if not IMAGE:  # no secret tells where Python is: it lies where a shell looks
        python = {"claim": "machine", "path": "/usr/local", "sub_path": str(Path(sys.prefix).resolve()).lstrip("/")}
        asked["compute"]["volumes"].append(python)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(asked))
    command = [str(Path(sys.executable).parent / "dropforge"), "bench", "network", "--recipe", str(recipe)]
    env = {**os.environ, "KUBECONFIG": str(namespace.kubeconfig), "DROPFORGE_STATE": str(tmp_path / "none")}
    done = subprocess.run(
        [*command, "--seconds", "2", "--json"], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["nodes"], found["transport"]) == (2, 2, "gloo")
    assert [host.rpartition("-")[0].rpartition("-")[2] for host in found["hosts"]] == ["master", "worker"]
    assert found["links"][0]["gb_per_second"] > 0
    assert namespace.jobs() == []
    wait("the pods to go", lambda: namespace.running() == [])
