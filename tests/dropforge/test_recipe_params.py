"""Params in MLflow: few, and all of the recipe can be read from them."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.errors import RecipeError
from dropforge.recipe_params import to_params, with_defaults
from dropforge.recipes import load_recipe
from dropforge.recipes.load import presets

NESTED: dict[str, Any] = {
    "curation": {"dedup": {}, "pii": {"action": "mask"}, "quality": {"c4": {}}, "decontaminate": None},
    "train": {"warmup": 0, "seed": 42, "learning_rate": 0.01},
    "data": {"mix": {"a.jsonl": 2}, "prompt_template": "{a}: None"},
    "evaluate": {"generation": {"rows": 5}},
}


@pytest.mark.parametrize("preset", presets())
def test_what_differs_from_the_defaults_is_all_that_a_reader_needs(preset: str) -> None:
    try:
        recipe = load_recipe(preset)
    except RecipeError:  # it has no base of its own
        recipe = load_recipe(preset, {"base": {"model": "any/model"}})
    assert with_defaults(to_params(recipe)) == recipe.flat()
    assert with_defaults(recipe.flat()) == recipe.flat()  # a run of an earlier version


def test_sections_that_are_set_are_whole() -> None:
    recipe = load_recipe("sample", NESTED)
    assert with_defaults(to_params(recipe)) == recipe.flat()
    assert to_params(recipe)["curation.quality.c4.min_sentences"] == recipe.flat()["curation.quality.c4.min_sentences"]


def test_runs_of_a_small_recipe_have_few_params_and_what_tells_runs_apart() -> None:
    params = to_params(load_recipe("tiny", {"train": {"max_steps": 7}}))
    assert len(params) < 40
    assert params["train.max_steps"] == "7"
    assert {"task", "base.model", "train.method", "train.learning_rate", "compute.backend", "compute.gpus"} <= {*params}
    assert not [key for key in params if key.startswith(("promote.min_", "curation.", "evaluate."))]
