"""`code`: what a recipe's wheel provides, looked at before anything starts; nothing of it is run here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipes.rules import SCORES
from dropforge.store import Store
from dropforge.wheel import ANSWERS, KERNELS, Wheel, fetch


def look_at(recipe: Recipe, store: Store | None = None) -> Wheel | None:
    """What takes part of the user's own; None without a wheel, or if only the pods see the folder where it lies.

    :param store: the bucket of all runs, where a client for it is at hand.
    :raises RecipeError: if the wheel is not there, is another one or may not be used, or lacks what the recipe names.
    """
    code = recipe.code
    if code is None:
        return None
    away = recipe.compute.backend == "kubernetes" and code.wheel.startswith("/") and not Path(code.wheel).is_file()
    if away and not recipe.curation.kernels:  # the curation, which needs its kernels, is no pod
        return None
    inside = store is not None and code.wheel.startswith(f"{store.uri}/")
    with tempfile.TemporaryDirectory(prefix="dropforge-code-") as folder:
        found = fetch(code.wheel, code.sha256, Path(folder) / "wheel", store if inside else None)
    generation = recipe.evaluate.generation
    for name in generation.metrics if generation else ():
        if name not in SCORES and name not in found.names(ANSWERS):
            there = ", ".join([*SCORES, *found.names(ANSWERS)])
            raise RecipeError(
                "recipe key `evaluate.generation.metrics`", f"there is no metric {name!r}", f"There are {there}"
            )
    check_kernels(recipe, found)
    return found


def check_kernels(recipe: Recipe, wheel: Wheel) -> None:
    """:raises RecipeError: if the wheel lacks a kernel that the recipe names."""
    there = wheel.names(KERNELS)
    for name in recipe.curation.kernels:
        if name not in there:
            raise RecipeError(
                "recipe key `curation.kernels`",
                f"{wheel.name} has no kernel {name!r}",
                f"There are {', '.join(there)}" if there else f"Give the wheel entry points of {KERNELS!r}",
            )


def told(recipe: Recipe, wheel: Wheel | None) -> str:
    """In words, for a plan."""
    assert recipe.code is not None
    return str(wheel) if wheel is not None else f"{recipe.code.wheel}, which is looked at where the pods see it"
