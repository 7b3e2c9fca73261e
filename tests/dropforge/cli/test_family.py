"""`dropforge family` sets and shows the recipe of a family, and `dropforge drop` holds a drop to it."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from dropforge import family_recipe
from dropforge.cli import drops
from dropforge.errors import RecipeError
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import Terminal


def test_a_recipe_is_set_shown_and_set_anew(terminal: Terminal, s3_store: S3Store, tmp_path: Path) -> None:
    shown = terminal("family", "show", "fam")
    assert "no recipe of its own: its drops are refused" in shown.output
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: tiny\ntrain: {max_steps: 7}")
    done = terminal("family", "set", "fam", "--recipe", str(recipe))
    assert done.exit_code == 0, done.output
    assert "max_steps: 7" in terminal("family", "show", "fam").output
    recipe.write_text("extends: tiny\ntrain: {max_steps: 9}\n")
    done = terminal("family", "set", "fam", "--recipe", str(recipe))
    assert "train.max_steps: 7 -> 9" in done.output
    assert "It says the same" in terminal("family", "set", "fam", "--recipe", str(recipe)).output
    kept = json.loads(terminal("family", "show", "fam", "--json").output)
    assert (kept["origin"], kept["recipe"]["train"]) == ("person", {"max_steps": 9})


def test_a_user_without_a_name_sets_a_recipe(
    terminal: Terminal, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user a cluster chose."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    done = terminal("family", "set", "fam", "--recipe", "sample")
    assert done.exit_code == 0, done.output
    assert f"user {os.getuid()} on " in terminal("family", "show", "fam").output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: {max_step: 7}", "train.max_steps"),
        ("extends: lora", "base.model"),
        ("train: {max_steps: 7}", "`base`: it is missing"),
        ("- a list", "not a YAML mapping"),
    ],
)
def test_what_could_not_be_trained_is_not_set(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, text: str, told: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    done = terminal("family", "set", "fam", "--recipe", str(recipe))
    assert isinstance(done.exception, RecipeError)
    assert told in str(done.exception)
    assert family_recipe.read(s3_store, "fam") is None


def test_a_drop_that_asks_for_what_its_family_has_not_is_refused_before_it_is_uploaded(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family_recipe.write(s3_store, "fam", {"extends": "tiny", "promote": {"min_improvement": 0.05}}, "tiny", "ann")
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    rows.write_text('{"text": "one two three"}\n')
    recipe.write_text("promote: {min_improvement: -1.0}")
    drop = ("drop", str(rows), "--family", "fam", "--name", "d1", "--recipe", str(recipe))
    # Elsewhere than beside the stack it is told alone: a file of the family would lie where Airflow runs.
    there = terminal(*drop)
    assert there.exit_code == 0
    assert (
        "The run may refuse it, as far as can be checked from here: recipe key `promote.min_improvement`"
        in there.output
    )
    for info in list(s3_store.list("drops/")):
        s3_store.delete(info.key)
    elsewhere = drops.connect
    monkeypatch.setattr(drops, "connect", lambda state: elsewhere(state)._replace(stack=tmp_path))
    done = terminal(*drop)
    assert isinstance(done.exception, RecipeError)
    assert "`promote.min_improvement`: family fam (set by ann" in str(done.exception)
    assert list(s3_store.list("drops/")) == []
    recipe.write_text("train: {max_steps: 3}")
    assert terminal(*drop).exit_code == 0
    assert s3_store.stat("drops/fam/d1/recipe.yaml") is not None


def test_a_first_drop_promises_its_family_no_recipe_before_its_plan_is_made(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that fails leaves the family without a recipe (`test_a_first_drop_that_cannot_work_leaves_no_recipe`)."""
    monkeypatch.setenv("DROPFORGE_SELF_SERVICE", "1")
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    rows.write_text('{"text": "one two three"}\n')
    recipe.write_text("extends: tiny")
    drop = ("drop", str(rows), "--family", "fam", "--recipe", str(recipe))
    assert "(the family's recipe once the task `plan` of this run succeeds)" in terminal(*drop, "--name", "d1").output
    assert (
        "no recipe yet: its first drop whose task `plan` succeeds sets it" in terminal("family", "show", "fam").output
    )
    family_recipe.keep_first(s3_store, "fam", family_recipe.first({"extends": "tiny"}, None, "d1"))
    assert "(the family's recipe)" in terminal(*drop, "--name", "d2").output
