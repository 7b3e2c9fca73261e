"""Prompts of the evaluation by generation: the last answer held out, tokens as the training and a user have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from dropforge.errors import DataError
from trainer.data.chat import make_encoder
from trainer.data.prompts import Prompt, end_tokens, held_out, make_prompts, read_prompts, write_prompts
from trainer.data.rows import Row
from trainer.data.tokenizer import END, EOS, train_tokenizer, wrap_tokenizer
from trainer.generate import _answer
from trainer.scores import SCORES

from .test_data import NO_MARKERS, TEXTS
from .test_template import CHATML, QWEN_3
from .test_template import tokenizer as chat_tokenizer
from .test_turns import TOOLS

TALK = (("system", "be brief"), ("user", "the red cat"), ("assistant", "sees"), ("user", "the bird"),
        ("assistant", "follows the old dog"))  # fmt: skip


def row(messages: Any = None, text: str | None = None) -> Row:
    return Row(b"\x01" * 16, messages, text)


@pytest.fixture(params=["own", "template"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = wrap_tokenizer(train_tokenizer(iter(TEXTS), 320), 128)
    if request.param == "template":
        made.chat_template = NO_MARKERS
    return made


def test_a_prompt_is_how_the_row_begins_that_is_trained(tokenizer: Any) -> None:
    [prompt] = make_prompts(tokenizer, [row(TALK)], 5)
    [[whole]] = make_encoder(tokenizer, "answers").encode([row(TALK)])
    ids, trained = list(whole.ids), list(whole.trained)
    size = len(prompt.ids)
    assert ids[:size] == list(prompt.ids)
    assert trained[size]
    assert not trained[size - 1]
    assert sum(trained[:size]) > 0  # and it is the second one
    assert prompt.answer == tokenizer.decode(
        [token for token, target in zip(ids[size:], trained[size:], strict=True) if target], skip_special_tokens=True
    )
    assert prompt.text.endswith("assistant\n")
    assert prompt.row == "01" * 16


def test_a_tokenizer_that_adds_a_begin_token_doubles_none(tokenizer: Any) -> None:
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)]
    )
    assert tokenizer("the cat")["input_ids"][0] == bos  # it does add one
    [prompt] = make_prompts(tokenizer, [row(TALK)], 1)
    assert (prompt.ids[0], prompt.ids.count(bos)) == (bos, 1)


def test_the_end_of_what_is_trained_ends_an_answer(tokenizer: Any) -> None:
    [[whole]] = make_encoder(tokenizer, "answers").encode([row(TALK)])
    last = max(place for place, target in enumerate(whole.trained) if target)
    vocabulary = tokenizer.get_vocab()
    assert whole.ids[last] in end_tokens(tokenizer)
    assert set(end_tokens(tokenizer)) == {vocabulary[EOS], vocabulary[END]}


def test_of_all_rows_the_first_with_an_answer_are_asked(tokenizer: Any) -> None:
    asked = (("user", "a"), ("assistant", "b"))
    rows = [row(text="plain"), row((("user", "a"),)), row((("assistant", "b"),)), row(asked), row((*asked, *TALK[1:4]))]
    assert held_out(rows[4]) == (row((*asked, TALK[1])), "sees")
    unread = iter([*rows, row(asked)])
    assert [prompt.answer for prompt in make_prompts(tokenizer, unread, 2)] == ["b", "sees"]
    assert len(list(unread)) == 1
    with pytest.raises(DataError, match="none of them is a conversation with an answer of text alone"):
        make_prompts(tokenizer, rows[:3], 2)


def test_a_row_that_a_template_refuses_is_asked_of_nobody_but_stays() -> None:
    tokenizer = wrap_tokenizer(train_tokenizer(iter(TEXTS), 320), 128)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + NO_MARKERS
    )
    refused, taken = make_prompts(tokenizer, [row(TALK), row(TALK[1:])], 2)
    assert refused == Prompt("01" * 16, "", (), "follows the old dog")
    assert taken.ids


def test_prompts_outlive_a_file(tokenizer: Any, tmp_path: Path) -> None:
    found = make_prompts(tokenizer, [row(TALK), row(TALK[1:])], 2)
    write_prompts(found, tmp_path / "prompts.json")
    assert read_prompts(tmp_path / "prompts.json") == found


def test_what_a_template_puts_before_an_answer_ends_with_the_lead() -> None:
    """As Qwen 3's empty thoughts, or those of the row: they are no part of the reference."""
    made = chat_tokenizer(QWEN_3)
    end = made.convert_tokens_to_ids("</think>")
    talk = (("user", "the cat"), ("assistant", "sees"))
    thinking = (talk[0], ("assistant", "<think>\nso\n</think>\n\nsees"))
    found = make_prompts(made, [row(talk), row(thinking), row((*talk, *TALK[1:3]))], 3)
    assert [(prompt.answer, prompt.lead) for prompt in found] == [("sees", end), ("sees", end), ("sees", end)]
    thought = Row(b"k" * 16, talk, None, beside=({}, {"reasoning_content": "so"}))
    assert [prompt.lead for prompt in make_prompts(chat_tokenizer(TOOLS), [thought, row(talk)], 2)] == [end, None]
    assert make_prompts(chat_tokenizer(CHATML), [row(talk)], 1)[0].lead is None
    # Short answers stand in the thoughts, and in the marks themselves.
    for answer in ("sees", "in", "k", "end"):
        short = (talk[0], ("assistant", answer))
        named = Row(b"k" * 16, short, None, beside=({}, {"reasoning_content": f"it {answer}, so {answer}"}))
        assert [prompt.lead for prompt in make_prompts(chat_tokenizer(TOOLS), [named, row(short)], 2)] == [end, None]
        assert make_prompts(made, [row(short)], 1)[0].lead == end


@pytest.mark.parametrize("opens", [False, True], ids=["closed", "opened"])
@pytest.mark.parametrize("marks", ["special", "added", "letters"])
@pytest.mark.parametrize(
    "said",
    ["<think>\nhm hm\n</think>\n\nsees the cat", "<think>hm hm</think>sees the cat", "hm hm</think>\n\nsees the cat"],
)
def test_who_writes_thoughts_and_answer_as_taught_has_answered_right(said: str, marks: str, opens: bool) -> None:
    """As distilled data has them, also where the prompt opens the thoughts, as those of Qwen 3's thinking models do."""
    made = wrap_tokenizer(train_tokenizer(iter(TEXTS), 320), 512)
    if marks != "letters":
        special = marks == "special"  # Qwen 3's are not
        made.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")], special_tokens=special)
    asking, opened = (
        "add_generation_prompt %}{{ '<|im_start|>assistant\\n" + more for more in ("' }}", "<think>\\n' }}")
    )
    assert asking in QWEN_3
    made.chat_template = QWEN_3.replace(asking, opened) if opens else QWEN_3
    asked = row((("user", "the cat"), ("assistant", said)))
    [[taught]] = make_encoder(made, "answers").encode([asked])
    [prompt] = make_prompts(made, [asked], 1)
    ends = set(end_tokens(made))
    written = list(taught.ids)[len(prompt.ids) :]
    written = written[: 1 + next(place for place, token in enumerate(written) if token in ends)]
    answer = _answer(written, ends, made, prompt.lead)
    assert prompt.answer == "sees the cat"
    assert SCORES["exact-match"](answer.said, prompt.answer) == 1.0
    assert SCORES["exact-match"](_answer(written[:-3], ends, made, prompt.lead).said, prompt.answer) == 0.0
