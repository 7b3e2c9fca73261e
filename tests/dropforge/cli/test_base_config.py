"""`dropforge plan` of a base whose config lies in a folder or in the bucket of the stack that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dropforge.cli.submit import check
from dropforge.errors import RecipeError
from dropforge.recipes import load_recipe
from dropforge.shape import check_positions, positions_of
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import Terminal

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}


def test_plan_reads_the_config_of_a_base_in_the_bucket(terminal: Terminal, s3_store: S3Store, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for name, positions in (("long", 2048), ("short", 512)):
        config = json.dumps(CONFIG | {"max_position_embeddings": positions})
        s3_store.put(f"models/{name}/config.json", config.encode())
        recipe.write_text(f"extends: lora\nbase: {{model: 's3://{s3_store.bucket}/models/{name}'}}\n")
        done = terminal("plan", str(recipe))
        assert "parameters      1" in done.stdout
        assert (done.exception is None) == (name == "long"), done.output
    assert "1024 is longer than the base model's context of 512" in str(done.exception)
    recipe.write_text(f"extends: lora\nbase: {{model: 's3://{s3_store.bucket}/models/none'}}\n")
    assert "models/none has no config.json and safetensors" in str(terminal("plan", str(recipe)).exception)
    recipe.write_text("extends: lora\nbase: {model: 's3://others/models/none'}\n")
    assert terminal("plan", str(recipe)).exit_code == 0  # what the pods may read there is theirs


def test_plan_refuses_a_folder_without_a_model(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, models = tmp_path / "recipe.yaml", tmp_path / "models"
    (models / "empty").mkdir(parents=True)
    monkeypatch.setenv("DROPFORGE_READABLE", f"hub:* {models}/")
    for name in ("empty", "mistyped"):
        recipe.write_text(f"extends: lora\nbase: {{model: {models}/{name}}}\n")
        assert f"{models}/{name} has no config.json. Name a folder" in str(terminal("plan", str(recipe)).exception)
    recipe.write_text("extends: lora\nbase: {model: /only/on/the/pods}\n")
    assert terminal("plan", str(recipe)).exit_code == 0


def test_plan_shows_the_epochs_beside_the_steps(terminal: Terminal, tmp_path: Path) -> None:
    recipe, data = tmp_path / "recipe.yaml", tmp_path / "a.txt"
    data.write_text("some words\n" * 9000)
    for train, told in (("{epochs: 2, max_steps: null}", "; 2 epochs"), ("{max_steps: null}", "; 1 epoch,")):
        recipe.write_text(f"extends: tiny\ntrain: {train}\n")
        shown = " ".join(terminal("plan", str(recipe), "--data", str(data)).stdout.split())
        assert "estimated from the length of the text" in shown
        assert told in shown
    recipe.write_text("extends: tiny\ntrain: {max_steps: 30}\n")
    assert "epoch" not in terminal("plan", str(recipe)).stdout


def test_plan_points_out_that_few_rows_are_evaluated_on(terminal: Terminal, tmp_path: Path) -> None:
    recipe, data = tmp_path / "recipe.yaml", tmp_path / "a.jsonl"
    recipe.write_text("extends: tiny\ndata: {eval_fraction: 0.05}\n")
    for rows, few in ((80, True), (800, False)):
        data.write_text('{"text": "some words"}\n' * rows)
        shown = " ".join(terminal("plan", str(recipe), "--data", str(data)).stdout.split())
        assert ("The evaluation has about 4 rows, fewer than 20" in shown) == few
        assert ("fewer than 20" in shown) == few


def test_submit_refuses_rows_that_are_longer_than_the_base_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    recipe = load_recipe("lora", {"base": {"model": str(tmp_path)}})
    with pytest.raises(RecipeError, match="1024 is longer than the base model's context of 512"):
        check(recipe, "fam/d1")


def test_plan_points_out_that_a_training_has_few_steps(terminal: Terminal, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: tiny\ntrain: {max_steps: 3}\n")
    assert "The training has 3 steps, fewer than 10" in " ".join(terminal("plan", str(recipe)).stdout.split())


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "t5", "n_positions": 512}, None),  # its positions are relative, and the library knows no bound
        ({"model_type": "mpt", "max_seq_len": 2048}, None),
        ({"max_position_embeddings": True}, None),
    ],
)
def test_the_bound_is_the_one_that_the_trainer_holds_rows_to(config: dict[str, object], found: int | None) -> None:
    assert positions_of(config) == found
    check_positions(512, found)
