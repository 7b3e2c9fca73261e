"""Settings of curation that cannot work together, each with its mend."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipe_data import found

MINIMA = 1024  # of a row's signature: more cost time, and find nothing that these do not
LEAST_FOUND = 0.5


def check_curation(recipe: Recipe) -> None:
    """:raises RecipeError: for the first combination that cannot work."""
    curation = recipe.curation
    twice = next((name for name in curation.prefer if curation.prefer.count(name) > 1), None)
    if twice is not None:
        raise RecipeError("recipe key `curation.prefer`", f"{twice!r} stands there twice", "Name each source once")
    if curation.pii is not None and len(set(curation.pii.kinds)) < len(curation.pii.kinds):
        again = next(kind for kind in curation.pii.kinds if curation.pii.kinds.count(kind) > 1)
        raise RecipeError("recipe key `curation.pii.kinds`", f"{again!r} stands there twice", "Name each kind once")
    dedup = curation.dedup
    if dedup is None:
        return
    if curation.exact_duplicates == "keep":
        raise RecipeError(
            "recipe keys `curation.dedup` and `curation.exact_duplicates`",
            "rows that are the same would be kept, and those that are nearly the same removed",
            "Use `exact_duplicates: drop`, or leave `dedup` out",
        )
    if dedup.bands * dedup.rows_per_band > MINIMA:
        raise RecipeError(
            "recipe keys `curation.dedup.bands` and `curation.dedup.rows_per_band`",
            f"{dedup.bands} bands of {dedup.rows_per_band} rows are {dedup.bands * dedup.rows_per_band} minima a row,"
            f" and at most {MINIMA} are made",
            "Lower one of them",
        )
    share = found(dedup.threshold, dedup.bands, dedup.rows_per_band)
    if share < LEAST_FOUND:
        rows = next(
            rows
            for rows in range(dedup.rows_per_band, 0, -1)
            if found(dedup.threshold, dedup.bands, rows) >= LEAST_FOUND
        )
        raise RecipeError(
            "recipe key `curation.dedup.rows_per_band`",
            f"{dedup.bands} bands of {dedup.rows_per_band} rows find {share:.0%} of the pairs whose similarity is the"
            f" threshold of {dedup.threshold:g}",
            f"Set it to {rows} or less, or use more bands",
        )
