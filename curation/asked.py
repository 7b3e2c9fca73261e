"""The rules of the stages of repair, quality and language, as a recipe asks for them: shares become whole numbers."""

from __future__ import annotations

from typing import TypedDict

from curation.c4 import C4
from curation.gopher import LONG, MILLION, TOP, Gopher, Repetition
from curation.language import Language, identifier, known
from curation.quality import Quality
from curation.repair import Repair, repair_rules
from dropforge import recipe_quality as recipe
from dropforge.errors import RecipeError
from dropforge.recipe_data import Curation


class Asked(TypedDict):
    """What of `curation.task.Rules` comes from here; None is off."""

    repair: Repair | None
    quality: Quality | None
    language: Language | None


def asked(curation: Curation) -> Asked:
    """:raises RecipeError: if a package is missing, or a language cannot be told."""
    return Asked(
        repair=repair_rules() if curation.unicode == "repair" else None,
        quality=None if curation.quality is None else _quality(curation.quality),
        language=None if curation.language is None else _language(curation.language),
    )


def _quality(quality: recipe.Quality) -> Quality:
    return Quality(
        gopher=None if quality.gopher is None else _gopher(quality.gopher),
        gopher_repetition=None if quality.gopher_repetition is None else _repetition(quality.gopher_repetition),
        c4=None if quality.c4 is None else C4(**quality.c4.model_dump()),
        of=quality.of,
    )


def _gopher(gopher: recipe.Gopher) -> Gopher:
    return Gopher(
        min_words=gopher.min_words,
        max_words=gopher.max_words,
        min_mean_word_length=_millionths(gopher.min_mean_word_length),
        max_mean_word_length=_millionths(gopher.max_mean_word_length),
        max_hashes=_millionths(gopher.max_hashes),
        max_ellipses=_millionths(gopher.max_ellipses),
        max_bullet_lines=_millionths(gopher.max_bullet_lines),
        max_ellipsis_lines=_millionths(gopher.max_ellipsis_lines),
        min_alphabetic_words=_millionths(gopher.min_alphabetic_words),
        min_stop_words=gopher.min_stop_words,
        stop_words=tuple(gopher.stop_words),
    )


def _repetition(repetition: recipe.GopherRepetition) -> Repetition:
    return Repetition(
        max_duplicate_lines=_millionths(repetition.max_duplicate_lines),
        max_duplicate_paragraphs=_millionths(repetition.max_duplicate_paragraphs),
        max_duplicate_line_characters=_millionths(repetition.max_duplicate_line_characters),
        max_duplicate_paragraph_characters=_millionths(repetition.max_duplicate_paragraph_characters),
        max_top_grams=tuple(_millionths(getattr(repetition, f"max_top_{n}_gram")) for n in TOP),
        max_duplicate_grams=tuple(_millionths(getattr(repetition, f"max_duplicate_{n}_gram")) for n in LONG),
    )


def _language(language: recipe.Language) -> Language:
    strange = sorted(set(language.keep) - known())
    if strange:
        raise RecipeError(
            "recipe key `curation.language.keep`",
            f"{identifier()} cannot detect {', '.join(strange)}",
            f"Name languages of {', '.join(sorted(known()))}",
        )
    keep = tuple(sorted(set(language.keep)))
    return Language(keep, language.of, language.min_letters, language.unknown, identifier())


def _millionths(value: float | None) -> int | None:
    return None if value is None else round(value * MILLION)
