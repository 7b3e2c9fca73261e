"""Composition: like the standard library's, and never the square of a hostile text."""

from __future__ import annotations

import unicodedata

import pytest

from curation.composing import MOST_MARKS, composed
from curation.identity import fold
from curation.words import normal

MARKS = "\u0301\u0316"  # one above, one below: each pair is put into its order


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
@pytest.mark.parametrize("text", ["a\u0301", "\uff21bc", "x" * 2000 + "e\u0316\u0301", "a" + MARKS * 40, "plain"])
def test_ordinary_text_is_composed_as_unicode_says(text: str, form: str) -> None:
    assert composed(text, form) == unicodedata.normalize(form, text)  # type: ignore[arg-type]


def test_text_with_more_marks_than_any_language_has_stays_as_it_is() -> None:
    text = "x" * 2000 + "e" + MARKS * MOST_MARKS
    assert composed(text) == text


@pytest.mark.parametrize("of", [fold, normal])
def test_a_million_marks_take_no_more_than_their_time(of) -> None:  # type: ignore[no-untyped-def]
    """By the square this would take a quarter of an hour, and end by the time limit of tests."""
    assert len(of("a" + MARKS * 500_000)) == 1_000_001
