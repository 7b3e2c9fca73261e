"""What a promotion cannot be decided by, refused before anything is trained."""

from __future__ import annotations

from typing import Final, get_args

from dropforge import holdout
from dropforge.errors import RecipeError
from dropforge.promotion import LEAST_ROWS
from dropforge.recipe import Recipe
from dropforge.recipe_data import Data, Role, placeholders
from dropforge.slices import OWN

WHOLE: Final = ("model/", "cost/", holdout.PREFIX)  # metrics of no rows of the drop's


def check_promotion(recipe: Recipe) -> None:
    """:raises RecipeError: if the section `promote` asks for what no evaluation could show."""
    _check_slices(recipe)
    _check_costs(recipe)
    _check_holdout(recipe)
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


def _check_slices(recipe: Recipe) -> None:
    kept, slices = recipe.data.keep_columns, recipe.promote.slices
    for number, part in enumerate(slices):
        key = f"recipe key `promote.slices[{number}]"
        if part.by not in OWN and kept != "all" and part.by not in (kept or ()):
            raise RecipeError(
                f"{key}.by`",
                f"no column {part.by!r} is kept with the rows",
                f"Name it in `data.keep_columns`, or cut by {' or '.join(f'`{name}`' for name in OWN)}",
            )
        reader = _read_by(recipe.data, part.by) if part.by not in OWN and kept == "all" else None
        if reader is not None:
            raise RecipeError(
                f"recipe key `{reader}`",
                f"the column {part.by!r} is read for its meaning, so that `data.keep_columns: all` does not keep it,"
                f" and `promote.slices[{number}].by` is {part.by!r}",
                f"Leave it out, or name {part.by!r} in `data.keep_columns`, which keeps it whatever it is read for",
            )
        if part.by in {other.by for other in slices[:number]}:
            raise RecipeError(f"{key}.by`", f"rows are cut by {part.by!r} twice", "Give it one entry with all guards")
        whole = next((guard.metric for guard in part.guards if guard.metric.startswith(WHOLE)), None)
        if whole is not None:
            raise RecipeError(f"{key}.guards`", f"`{whole}` is the same in each slice", "Move it to `promote.guards`")
        if part.min_rows > recipe.evaluate.max_rows:
            raise RecipeError(
                f"{key}.min_rows`",
                f"{part.min_rows} are more than the {recipe.evaluate.max_rows} rows of `evaluate.max_rows`",
                "Lower it, or raise `evaluate.max_rows`",
            )


def _read_by(data: Data, column: str) -> str | None:
    """The key for whose sake a column is read for its meaning, by its name without case; None if there is none."""
    readers = [(f"data.columns.{role}", name) for role, name in (data.columns or {}).items()]
    readers += [("data.prompt_template", name) for name in placeholders(data.prompt_template or "")]
    readers += [("data.text_column", data.text_column), *(("data.keep_columns", str(role)) for role in get_args(Role))]
    return next((key for key, name in readers if name.strip().lower() == column.strip().lower()), None)


def _check_holdout(recipe: Recipe) -> None:
    named, labels = recipe.evaluate.holdout, recipe.task == "classification"
    for number, guard in enumerate(recipe.promote.guards):
        if not guard.metric.startswith(holdout.PREFIX):
            continue
        key = f"recipe key `promote.guards[{number}].metric`"
        if named is None:
            raise RecipeError(key, f"no rows are there to measure `{guard.metric}`", "Name them in `evaluate.holdout`")
        if labels != (guard.metric == "holdout/macro_f1") and guard.metric not in ("holdout/loss", "holdout/accuracy"):
            raise RecipeError(
                key,
                f"`{guard.metric}` says nothing of {'a classifier' if labels else 'a language model'}",
                "Use `holdout/loss` or `holdout/accuracy`",
            )


def _check_costs(recipe: Recipe) -> None:
    for number, guard in enumerate(recipe.promote.guards):
        if not guard.metric.startswith("cost/"):
            continue
        key = f"recipe key `promote.guards[{number}]"
        if guard.max_regression is not None:
            raise RecipeError(
                f"{key}.max_regression`",
                f"`{guard.metric}` is what this run has used, and the champion's run had other data and machines",
                "Give it `at_most`",
            )
        if guard.metric == "cost/total" and recipe.compute.price is None:
            raise RecipeError(f"{key}.metric`", "no price makes a cost known", "Set `compute.price`")
