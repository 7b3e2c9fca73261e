"""The pages on backup and removal, typed as they are: scripts stand for the cluster and for PostgreSQL's tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.install.keys import airflow_keys
from dropforge.install.plan import chosen, text
from tests.compose.server import page_commands
from tests.dropforge.install.test_plan import PAIRS, ROOT
from tests.dropforge.install.test_values import FILES

PAGES = ROOT / "docs" / "how-to" / "install"
POD = yaml.safe_load((PAGES / "database-pod.yaml").read_text())
LATER = "?connect_timeout=30&tcp_user_timeout=50000"
ADDRESSES = {
    "airflow": "postgresql+psycopg2://a:pw@db.example:5432/airflow",
    "mlflow": f"postgresql+psycopg2://m:pw@db.example:5432/mlflow{LATER}",
}
#: `exec` runs in the pod: with its variables.
KUBECTL = """#!/bin/bash
echo "kubectl $*" >>told
case "$1" in
  exec) while [ "$1" != -- ]; do shift; done; shift; exec env airflow="$AIRFLOW" mlflow="$MLFLOW" "$@" ;;
  get) cat secrets ;;
esac
"""
TOOL = """#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>told
case $name in pg_dump) echo "dump of $*" ;; pg_restore) cat >>restored ;; esac
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs lines of a page in a folder of its own, and returns what the stand-ins were told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pg_dump", "psql", "pg_restore", "helm"):
        (folder / name).write_text(TOOL)
    (folder / "kubectl").write_text(KUBECTL)
    for file in folder.iterdir():
        file.chmod(0o755)
    for name in ("plan.sh", "images.lock", "settings.env", "connections.env", "preset.yaml"):
        (tmp_path / name).touch()
    secrets = [{**one, "metadata": {**one["metadata"], "resourceVersion": "7"}} for one in airflow_keys("laptop")]
    (tmp_path / "secrets").write_text(json.dumps({"kind": "List", "items": secrets}))

    def run(script: str) -> list[str]:
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        env |= {name.upper(): address for name, address in ADDRESSES.items()}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=env, capture_output=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "told").read_text().splitlines()

    return run


def test_a_backup_has_both_databases_and_the_keys_in_a_form_that_can_be_created_again(
    shell: Any, tmp_path: Path
) -> None:
    (block,) = page_commands("kubernetes-backup.md", "Back up")
    told = shell(block)
    for name, address in ADDRESSES.items():
        dumped = f"--format custom --no-owner {address.replace('+psycopg2', '')}"
        assert f"pg_dump {dumped}" in told
        assert (tmp_path / "backup" / f"{name}.dump").read_text() == f"dump of {dumped}\n"
    kept = json.loads((tmp_path / "backup" / "secrets.json").read_text())["items"]
    assert {one["metadata"]["name"] for one in kept} == {one["metadata"]["name"] for one in airflow_keys("laptop")}
    assert not [one for one in kept if "resourceVersion" in one["metadata"]], "an API server refuses to create these"
    (asked,) = (line for line in told if "get secret" in line)
    assert set(re.findall(r"dropforge-[a-z-]+", asked)) == {one["metadata"]["name"] for one in airflow_keys("laptop")}
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    assert "pw" not in "".join(line for line in told if line.startswith("kubectl"))


def test_a_restore_stops_what_writes_and_fills_each_database_with_its_own(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    for name in ADDRESSES:
        (tmp_path / "backup" / f"{name}.dump").write_text(f"{name}'s rows\n")
    (block,) = page_commands("kubernetes-backup.md", "Restore into the same cluster")
    told = shell(block)
    assert told[0] == "kubectl scale deployment --all --replicas 0 --namespace airflow"
    ready = told.index(
        f"kubectl wait --namespace airflow pod/{POD['metadata']['name']} --for condition=Ready --timeout 5m"
    )
    assert max(place for place, line in enumerate(told) if "--for delete" in line) < ready, "else it waits for itself"
    tools = [line for line in told if line.startswith(("psql", "pg_restore"))]
    to = [address.replace("+psycopg2", "") for address in ADDRESSES.values()]
    assert [line.split()[0] for line in tools] == ["psql", "pg_restore"] * 2
    assert [next(one for one in to if one in line) for line in tools] == [to[0], to[0], to[1], to[1]]
    assert (tmp_path / "restored").read_text() == "airflow's rows\nmlflow's rows\n"


def test_keys_alone_are_taken_out_of_a_backup(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "secrets").rename(tmp_path / "backup" / "secrets.json")
    _all, alone = page_commands("kubernetes-backup.md", "Restore into another cluster")
    found = subprocess.run(
        ["bash", "-c", alone.partition(" | kubectl")[0]], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert json.loads(found.stdout)["metadata"]["name"] == "dropforge-airflow-keys"


def test_the_pod_knows_the_addresses_that_the_plan_keeps() -> None:
    (container,) = POD["spec"]["containers"]
    kept = {one["metadata"]["name"]: set(one["stringData"]) for one in airflow_keys("laptop")}
    for variable in container["env"]:
        secret = variable["valueFrom"]["secretKeyRef"]
        assert secret["name"] == f"dropforge-{variable['name']}-database"
        assert secret["key"] in kept[secret["name"]]


@pytest.mark.parametrize(("size", "on"), PAIRS)
def test_a_removal_goes_through_all_releases_of_the_plan_from_its_end(
    shell: Any, tmp_path: Path, size: Any, on: Any
) -> None:
    (tmp_path / "plan.sh").write_text(text(size, on, FILES, {}))
    _first, last = page_commands("kubernetes-upgrade.md", "Removal")
    told = shell(last)
    charts = [step.chart for step in chosen(size, on) if step.chart and step.chart.namespace != "airflow"]
    assert [line for line in told if line.startswith("helm")] == [
        f"helm uninstall {chart.release} --namespace {chart.namespace}" for chart in reversed(charts)
    ]
    without = [line.split()[-1] for line in told if line.endswith(("v1.9.4", "v2.3.0"))]
    assert [address.split("/")[4].partition(".")[0] for address in without] == (
        ["training-operator"] if size == "laptop" else ["trainer", "training-operator"]
    )
    assert set(last.split()) >= {chart.namespace for chart in charts} - {"kube-system"}
