"""Answers of several models to the same prompts."""

from __future__ import annotations

import json

import pytest

from dropforge.answers import AnswerTable, match, read_answers


def table(*rows: tuple[str, str, str]) -> AnswerTable:
    data = [["key", prompt, reference, answer, True, 0.5] for prompt, reference, answer in rows]
    columns = ["row", "prompt", "reference", "answer", "ended", "rouge-l"]
    return read_answers(json.dumps({"columns": columns, "data": data}).encode(), "")


def test_answers_are_matched_by_their_prompts_and_shared_prompts_come_first() -> None:
    first = table(("only A", "x", "a1"), ("both", "x", "a2"))
    second = table(("both", "x", "b2"), ("only B", "x", "b1"))
    samples, prompts = match([[first], [second]], most=2)
    assert prompts == 3
    assert [sample.prompt for sample in samples] == ["both", "only A"]
    assert [answer and answer.text for answer in samples[0].answers] == ["a2", "b2"]
    assert [answer and answer.text for answer in samples[1].answers] == ["a1", None]
    assert samples[0].answers[0] is not None
    assert samples[0].answers[0].scores == {"rouge-l": 0.5}


def test_a_run_answers_where_it_was_the_champion_of_another_one() -> None:
    own, as_champion = table(("mine", "x", "own")), table(("mine", "x", "later"), ("theirs", "x", "beside"))
    samples, _ = match([[table(("theirs", "x", "a"))], [own, as_champion]])
    assert [(sample.prompt, [answer and answer.text for answer in sample.answers]) for sample in samples] == [
        ("theirs", ["a", "beside"]),
        ("mine", [None, "own"]),
    ]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"columns": ["a"], "data": [[1, 2]]}', b"\xff", b"[" * 99_999]
)
def test_what_is_no_table_of_answers_is_told(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_answers(content, "")
