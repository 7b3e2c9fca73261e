"""`base.start` of a recipe that a person gives on the command line: settled here, as the task that plans does it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dropforge.errors import RecipeError
from dropforge.run import RunSpec, Start
from dropforge.store import open_store

if TYPE_CHECKING:
    from dropforge.recipe import Recipe
    from dropforge.tracking import Champion


def settled(
    recipe: Recipe, root: str, family: str, before: RunSpec | None = None
) -> tuple[dict[str, Any], Start | None]:
    """The recipe as plain values with the model that it begins with as its base, and where that comes from.

    :param root: address of the bucket, where runs lie. :param before: the run that this one goes on with: where it
        began, it stays.
    :raises RecipeError: if there is no such model.
    """
    from dropforge.start import settle

    if before is not None and before.start is not None and before.start.asked == recipe.base.start:
        plain = recipe.plain()
        own = before.start.origin if before.start.kind != "base" else before.recipe["base"]
        if all(plain["base"][key] == own.get(key) for key in ("model", "scratch")):
            return {**plain, "base": dict(before.recipe["base"])}, before.start
    found, start = settle(recipe, open_store(root), family, _champion)
    return found.plain(), start


def _champion(family: str, alias: str) -> Champion | None:
    from dropforge import tracking

    server = os.environ.get("MLFLOW_TRACKING_URI")
    if not server:
        raise RecipeError(
            "recipe key `base.start`",
            "the family's champion is asked for, and no MLflow server is named",
            "Set MLFLOW_TRACKING_URI, or name the champion's folder as `base.model`",
        )
    with tracking.short_patience():
        return tracking.champion(server, family, alias)
