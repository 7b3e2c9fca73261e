"""`dropforge init`: the file that it writes is a recipe, as it stands and with all of its comments taken in."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.cli.init import recipe_text
from dropforge.errors import DropforgeError
from dropforge.recipes import load_recipe, parse_recipe, presets
from dropforge.recipes.rules import PLACEHOLDER


@pytest.mark.parametrize("preset", presets())
def test_the_file_is_the_preset_with_and_without_its_comments(preset: str) -> None:
    text, expected = recipe_text(preset, None, "recipe.yaml"), load_recipe(preset).plain()
    if expected["base"]["model"] == PLACEHOLDER:
        expected["base"]["model"] = "Qwen/Qwen2.5-0.5B-Instruct"
    assert parse_recipe(text).plain() == expected
    if expected["train"]["max_steps"] is None:
        assert "#-  epochs: " in text  # though the preset leaves it open
        expected["train"]["epochs"] = expected["train"]["epochs"] or 1.0
    assert parse_recipe(re.sub("^#-", "", text, flags=re.MULTILINE)).plain() == expected
    assert max(map(len, text.splitlines())) < 200


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    words = ["init", str(path), "--preset", "qwen3-4b-instruct", "--base", "s3://bucket/a: model #1"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, f"dropforge plan {path}" in done.output.replace("\n", "")) == (0, True)
    assert load_recipe(path).base.model == "s3://bucket/a: model #1"
    path.write_text("mine")
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, DropforgeError)
    assert path.read_text() == "mine"
    assert "Presets: " in str(CliRunner().invoke(app, ["init", str(tmp_path / "x"), "--preset", "nope"]).exception)


def test_a_full_disk_leaves_no_half_of_a_recipe_that_would_be_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ["init", str(tmp_path / "r.yaml")]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert isinstance(CliRunner().invoke(app, words).exception, OSError)
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, words).exit_code == 0
