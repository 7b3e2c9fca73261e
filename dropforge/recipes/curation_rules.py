"""Settings of curation that cannot work together, each with its mend."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipe_data import Curation, found
from dropforge.recipe_quality import Quality

MINIMA = 1024  # of a row's signature: more cost time, and find nothing that these do not
LEAST_FOUND = 0.5
# Keys that mean something beside `curation: none`.
TAKEN = ("steps", "engine", "deadline_minutes", "spark", "scope", "workers", "memory", "min_rows", "gate")


def check_curation(recipe: Recipe) -> None:
    """:raises RecipeError: for the first combination that cannot work."""
    curation = recipe.curation
    _check_none(curation)
    twice = next((name for name in curation.prefer if curation.prefer.count(name) > 1), None)
    if twice is not None:
        raise RecipeError("recipe key `curation.prefer`", f"{twice!r} is listed twice", "Name each source once")
    if curation.kernels and recipe.code is None:
        raise RecipeError(
            "recipe key `curation.kernels`", "`code` names no wheel that has them", "Name the wheel under `code`"
        )
    if len(set(curation.kernels)) < len(curation.kernels):
        raise RecipeError("recipe key `curation.kernels`", "one of them is listed twice", "Name each once")
    _check_quality(curation.quality)
    if curation.pii is not None and len(set(curation.pii.kinds)) < len(curation.pii.kinds):
        again = next(kind for kind in curation.pii.kinds if curation.pii.kinds.count(kind) > 1)
        raise RecipeError("recipe key `curation.pii.kinds`", f"{again!r} is listed twice", "Name each kind once")
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


def _check_none(curation: Curation) -> None:
    if curation.steps == "all":
        return
    plain = Curation(steps="none")
    others = (name for name in Curation.model_fields if name not in TAKEN)
    asked = next((name for name in others if getattr(curation, name) != getattr(plain, name)), None)
    if asked is not None:
        raise RecipeError(
            f"recipe key `curation.{asked}`",
            "`curation: none` takes all rows as they are",
            f"Leave it out, or leave `none` out; beside it there may be {', '.join(TAKEN[1:])}",
        )


def _check_quality(quality: Quality | None) -> None:
    if quality is None:
        return
    if quality.gopher is None and quality.gopher_repetition is None and quality.c4 is None:
        raise RecipeError(
            "recipe key `curation.quality`",
            "it names no rules, so no row would be judged",
            "Write `quality: {gopher: {}, gopher_repetition: {}}`, or leave it out",
        )
    gopher = quality.gopher
    if gopher is None:
        return
    for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
        least, most = getattr(gopher, low), getattr(gopher, high)
        if least is not None and most is not None and least > most:
            raise RecipeError(
                f"recipe keys `curation.quality.gopher.{low}` and `.{high}`",
                f"no row has at least {least:g} and at most {most:g}",
                "Swap them, or set one to null",
            )
    if gopher.min_stop_words is not None and gopher.min_stop_words > len(set(gopher.stop_words)):
        raise RecipeError(
            "recipe key `curation.quality.gopher.min_stop_words`",
            f"no row has {gopher.min_stop_words} of {len(set(gopher.stop_words))} stop words",
            "Lower it, or name more `stop_words`",
        )
