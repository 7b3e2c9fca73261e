"""What a promotion cannot be decided by, refused before anything is trained."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.promotion import LEAST_ROWS
from dropforge.recipe import Recipe


def check_promotion(recipe: Recipe) -> None:
    """:raises RecipeError: if the section `promote` asks for what no evaluation could show."""
    generation = recipe.evaluate.generation
    by_answers = generation is not None and recipe.promote.metric.startswith("gen/")
    key, rows = "evaluate.max_rows", recipe.evaluate.max_rows
    if generation is not None and by_answers:
        key, rows = "evaluate.generation.rows", generation.rows
    if recipe.promote.confidence is not None and rows < LEAST_ROWS:
        raise RecipeError(
            "recipe key `promote.confidence`",
            f"the {rows} rows of `{key}` are too few to be sure of a gain, whatever it is",
            f"Set `{key}` to {LEAST_ROWS} or more, or `promote.confidence: null`",
        )
