"""A recipe in a few words, for terminals and logs."""

from __future__ import annotations

from typing import Final

from dropforge.recipe import Recipe
from dropforge.text import escape

_TOY: Final = "a toy that learns from random weights; `base.model` names a model to fine-tune"
_HOW: Final = {
    "full": "all weights of",
    "lora": "LoRA adapters on",
    "qlora": "LoRA adapters on a quantised",
    "dora": "DoRA adapters on",
    "prefix": "a prefix for",
}


def trained(recipe: Recipe) -> str:
    """What a run of it trains: the method and the base model."""
    if recipe.base.model is None:
        return _TOY
    begun = "" if recipe.base.start == "base" else f", begun from {recipe.base.start}"
    return f"{_HOW[recipe.train.method]} {escape(recipe.base.model)}{begun}"
