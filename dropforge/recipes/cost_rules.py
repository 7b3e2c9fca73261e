"""Limits of a run that could never be looked at, refused before anything is trained."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipe_costs import Amounts


def check_costs(recipe: Recipe) -> None:
    """:raises RecipeError: if a cost is limited that no price makes known, or the run would end before it asks."""
    compute = recipe.compute
    if compute.limits is None:
        return
    ask, stop = compute.limits.ask_above, compute.limits.stop_above
    for name, amounts in (("ask_above", ask), ("stop_above", stop)):
        if amounts is not None and amounts.cost is not None:
            _check_price(recipe, f"compute.limits.{name}.cost")
    if ask is None or stop is None:
        return
    for name in Amounts.model_fields:
        asked, stopped = getattr(ask, name), getattr(stop, name)
        if asked is not None and stopped is not None and asked > stopped:
            raise RecipeError(
                f"recipe key `compute.limits.ask_above.{name}`",
                f"a run ends above {stopped:g}, so no approval would be asked for above {asked:g}",
                f"Ask above less than `compute.limits.stop_above.{name}`, or raise that",
            )


def _check_price(recipe: Recipe, key: str) -> None:
    price = recipe.compute.price
    needed = "gpu_hour" if recipe.compute.gpus else "core_hour"
    if price is None or getattr(price, needed) is None:
        raise RecipeError(
            f"recipe key `{key}`",
            f"what a run costs is not known without `compute.price.{needed}`",
            f"Set `compute.price.{needed}`, or limit hours",
        )
