"""The wheel: all that `dropforge up`, an Airflow of one's own and a training pod need, without a clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropforge.cli.app import app

ROOT = Path(__file__).parents[3]
DAGS = {path.name: path.read_bytes() for path in (ROOT / "dags").glob("*.py")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed, and nothing else."""
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--target", site, wheel], check=True)
    return site


def run(site: Path, *words: str) -> str:
    """Run Python with the wheel's packages before the clone's, away from the clone."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    env.pop("DROPFORGE_ROOT", None)
    done = subprocess.run([sys.executable, *words], cwd=site.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_brings_dags_plugin_presets_and_types(site: Path, tmp_path: Path) -> None:
    code = "from dropforge.source_root import source_root; print(source_root())"
    assert run(site, "-c", code).strip() == str(site / "dropforge")
    assert {path.name: path.read_bytes() for path in (site / "dropforge" / "dags").glob("*.py")} == DAGS
    assert (site / "dropforge" / "py.typed").exists()
    command = ("-c", "from dropforge.cli.app import main; main()")
    assert "llama-3.1-8b" in run(site, *command, "presets")
    assert "kind: Role" in run(site, *command, "manifests", "rights")
    code = "from importlib.metadata import entry_points as e; (p,) = e(group='airflow.plugins', name='dropforge')"
    assert run(site, "-c", f"{code}; print(p.load().name)").strip() == "dropforge"


def test_dag_files_go_into_a_folder_and_replace_others_only_when_told(tmp_path: Path) -> None:
    to = tmp_path / "dags" / "dropforge"
    assert CliRunner().invoke(app, ["dags", "--to", str(to)]).exit_code == 0
    assert {path.name: path.read_bytes() for path in to.iterdir()} == DAGS
    (to / "reap.py").write_text("# somebody's own\n")
    refused = CliRunner().invoke(app, ["dags", "--to", str(to)])
    assert refused.exit_code != 0
    assert (to / "reap.py").read_text() == "# somebody's own\n"
    assert CliRunner().invoke(app, ["dags", "--to", str(to), "--update"]).exit_code == 0
    assert {path.name: path.read_bytes() for path in to.iterdir()} == DAGS
