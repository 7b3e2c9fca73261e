"""A recipe as MLflow's params: what differs from the defaults, and a few that every run has.

MLflow compares runs by their params, of which a whole recipe has more than a hundred, nearly all the same in all runs.
The whole recipe is the run's artifact `recipe.yaml`; readers of params fill in the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from dropforge.recipe import Recipe

#: What runs are told apart by, whatever they are.
_ALWAYS: Final = frozenset(
    [
        "task",
        "base.model",
        "train.method",
        "train.learning_rate",
        "train.sequence_length",
        "train.precision",
        "compute.backend",
        "compute.nodes",
        "compute.gpus",
        "promote.metric",
    ]
)


def to_params(recipe: Recipe) -> dict[str, str]:
    """Return the params of a run: dotted keys of the recipe and text values."""
    known = _defaults()
    return {key: text for key, text in recipe.flat().items() if key in _ALWAYS or known.get(key) != text}


def with_defaults(params: Mapping[str, str]) -> dict[str, str]:
    """Return the flat recipe of a run by its params; runs of earlier versions have all of it among them."""
    # A section that a recipe has set has no default beside it, which is that there is none.
    sections = {key[:at] for key in params for at, sign in enumerate(key) if sign == "."}
    return {**{key: text for key, text in _defaults().items() if key not in sections}, **params}


@cache
def _defaults() -> Mapping[str, str]:
    flat = Recipe.model_validate({"base": {"model": "any/model"}}).flat()
    del flat["base.model"]
    return MappingProxyType(flat)
