"""The commands that start nothing, as a user types them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from dropforge.cli.airflow import last_error
from dropforge.cli.watch import STAGES, Stage, View, draw, sparkline
from dropforge.estimate import estimate, shape_of
from dropforge.recipes import load_recipe, presets


def dropforge(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from dropforge.cli.app import main; main()"
    command = [sys.executable, "-c", code, *words]
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "TERM": "dumb", "HOME": "/nonexistent"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


@pytest.mark.parametrize("preset", presets())
def test_render_prints_a_job(preset: str) -> None:
    done = dropforge("render", preset, "--family", "fam")
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    assert (job["kind"], job["apiVersion"]) == ("PyTorchJob", "kubeflow.org/v1")
    master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert master["command"][:3] == ["python", "-m", "trainer.launch"]


def test_plan_shows_what_would_happen(tmp_path: Path) -> None:
    done = dropforge("plan", "sample")
    assert done.returncode == 0, done.stderr
    for word in ("1,328,256", "120", "memory per rank", "fits", "checkpoint"):
        assert word in done.stdout


def test_an_error_names_the_mend_without_a_traceback(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: tiny\ntrain: {max_step: 3}\n")
    done = dropforge("plan", str(recipe))
    assert done.returncode == 2
    assert "Did you mean `train.max_steps`?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_stack_the_mend_is_said(tmp_path: Path) -> None:
    done = dropforge("runs", "--state", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "dropforge up" in done.stderr


def test_every_command_has_help() -> None:
    text = dropforge("--help").stdout
    for command in ("demo", "up", "down", "doctor", "drop", "follow", "runs", "render", "plan"):
        assert re.search(rf"\b{command}\b", text), command


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gpt2"])
def test_the_estimate_counts_what_the_trainer_makes(architecture: str) -> None:
    shape = shape_of(load_recipe("tiny", {"base": {"scratch": {"architecture": architecture}}}))
    assert shape is not None
    transformers = pytest.importorskip("transformers")
    from trainer.config import Scratch
    from trainer.data.tokenizer import SPECIAL
    from trainer.model.build import scratch_config

    scratch = Scratch(architecture, 64, 2, 2, 1024, 128)  # type: ignore[arg-type]
    config = scratch_config(scratch, dict(zip(SPECIAL, range(5), strict=True)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_what_looks_like_markup_is_told_as_it_is() -> None:
    done = dropforge("plan", "[/red]x")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "[/red]x" in done.stderr


def test_a_broken_config_beside_the_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{bad")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: full\nbase: {{model: {tmp_path}}}\n")
    done = dropforge("plan", str(recipe))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "config.json cannot be read" in done.stderr


def test_a_drop_whose_recipe_names_no_model_is_refused_before_the_upload(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("extends: lora\n")
    (tmp_path / "a.txt").write_text("x\n")
    for files in (("a.txt", "--recipe", "recipe.yaml"), (".",)):
        done = dropforge("drop", *files, "--family", "f", cwd=tmp_path)
        assert done.returncode == 2
        assert "`base.model`" in done.stderr


def test_steps_follow_from_the_data() -> None:
    recipe = load_recipe("sample")
    open_end = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": None, "epochs": 2.0})})
    figures = estimate(open_end, 4_000_000)
    assert figures.steps is not None
    assert 400 <= figures.steps <= 500
    assert estimate(open_end).steps is None


def test_the_view_shows_stages_and_training() -> None:
    view = View("fam/d", "running", tuple(Stage(name) for name in STAGES))
    view = replace(
        view,
        stages=(
            Stage("plan", "success", 1.0, 1),
            *view.stages[1:4],
            Stage("train", "deferred", 9.0, 2),
            *view.stages[5:],
        ),
        step=30,
        steps=120,
        losses=(4.0, 3.0, 2.0),
        tokens_per_second=5120.0,
        evals=(8.3, 2.5),
        note="resumed from step 20",
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(draw(view))
    text = console.export_text()
    for word in ("30/120", "loss 2.000", "5,120 tok/s", "eval 8.300 → 2.500", "try 2", "resumed from step 20"):
        assert word in text


def test_the_end_of_a_failed_run_is_the_error_of_its_log() -> None:
    failed = {
        "event": "Task failed",
        "error_detail": [{"exc_type": "E", "exc_value": "x failed\nLast lines of m:\n a"}],
    }
    assert last_error([{"event": "begin"}, failed, {"event": "end"}, "plain"]) == "x failed"
    assert last_error([{"event": "begin"}, "plain"]) is None


def test_sparklines() -> None:
    assert sparkline([1, 2, 3], 3) == "▁▅█"
    assert sparkline([], 5) == ""
    assert sparkline([float("nan"), 1.0], 5) == "▁"
    assert len(sparkline(list(range(1000)), 24)) == 24
