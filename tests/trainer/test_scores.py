"""The scores of generated answers: known values, and what their definitions say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.scores import common_subsequence, exact_match, rouge_l, token_f1, valid_json

WORDS = st.lists(st.sampled_from("abcd"), max_size=70)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        # Values of the package rouge-score 0.1.2, the first from its own page.
        ("The quick brown dog jumps on the log.", "The quick brown fox jumps over the lazy dog", 10 / 17),
        ("snake_case is one-off, isn't it?", "Snake case; is one off: isn t it", 1.0),
        # The examples of the paper, section 3.1.
        ("police kill the gunman", "police killed the gunman", 0.75),
        ("the gunman kill police", "police killed the gunman", 0.5),
        ("", "police", 0.0),
        ("...", "...", 0.0),
        ("über Straße 3", "Über STRASSE 3", 2 / 3),
    ],
)
def test_rouge_l_has_the_known_values(answer: str, reference: str, score: float) -> None:
    assert rouge_l(answer, reference) == pytest.approx(score, abs=1e-12)


@settings(deadline=None)
@given(WORDS, WORDS)
def test_the_common_subsequence_is_that_of_the_definition(left: list[str], right: list[str]) -> None:
    row = [0] * (len(right) + 1)
    for one in left:
        before = row
        row = [0]
        for place, other in enumerate(right):
            row.append(before[place] + 1 if one == other else max(before[place + 1], row[-1]))
    assert common_subsequence(left, right) == row[-1]


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The cat!", "a cat", 1.0),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("red", "blue", 0.0),
        ("the", "an", 1.0),
        ("", "cat", 0.0),
        ("1 2 3 4", "1 2", 2 / 3),
    ],
)
def test_token_f1_is_squads(answer: str, reference: str, score: float) -> None:
    assert token_f1(answer, reference) == pytest.approx(score)


def test_an_exact_match_differs_in_white_space_only() -> None:
    assert exact_match(" a  b\n", "a b") == 1
    assert exact_match("A b", "a b") == exact_match("a b.", "a b") == exact_match("", "a") == 0


@pytest.mark.parametrize("text", ['{"a": [1, null]}', " 3 ", '"x"', "[]"])
def test_json_is_told(text: str) -> None:
    assert valid_json(text) == 1


@pytest.mark.parametrize("text", ["", "{a: 1}", "NaN", "[Infinity]", '{"a": 1} and more', "[" * 100_000, "'x'"])
def test_what_is_no_json_is_told(text: str) -> None:
    assert valid_json(text) == 0
