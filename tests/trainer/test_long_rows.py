"""Rows without end: what one of them takes is bounded, and neither bounds nor batches change a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import chat, template
from trainer.data.chat import TemplateEncoder, documents, make_encoder
from trainer.data.labels import for_labels, labelled_documents
from trainer.data.rows import Row
from trainer.data.seq2seq import for_seq2seq, pairs

from .pairs import pair_tokenizer
from .test_template import DATA, KNOWN, TEXTS, row, tokenizer, wrap_tokenizer

PLAIN = [Row(b"k" * 16, None, text) for text in TEXTS[:20]]
CHATS = [row(*TEXTS[low : low + 6]) for low in range(0, 60, 6)]
KINDS = ["chatml", "marked", "qwen-3", "ours", "labels", "pairs"]


def read(kind: str, rows: Iterable[Row], facts: dict[str, Any]) -> Iterator[chat.Document]:
    if kind == "labels":
        labelled = (dataclasses.replace(one, label="a") for one in rows)
        return labelled_documents(for_labels(tokenizer(None)), ("a", "b"), labelled, 64, facts)
    if kind == "pairs":
        return pairs(for_seq2seq(pair_tokenizer()), rows, 64, facts)
    return documents(
        make_encoder(wrap_tokenizer(DATA, 64) if kind == "ours" else KNOWN[kind][0], "answers"), rows, 64, facts
    )


def told(found: Iterable[chat.Document]) -> list[tuple[Any, ...]]:
    return [(one.row, one.ids.tolist(), one.trained.tolist(), one.label, one.spelled) for one in found]


@pytest.mark.parametrize("name", ["chatml", "marked", "qwen-3", "gemma"])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_a_conversation_of_very_many_answers_is_left_out_with_its_reason(name: str, loss_on: str) -> None:
    """Each answer would be rendered with all before it."""
    many = row(*["a", "b"] * 10_000)
    if loss_on == "all":
        many = dataclasses.replace(many, beside=({}, {"train": False}) * 10_000)
    facts: dict[str, Any] = {}
    found = list(documents(TemplateEncoder(KNOWN[name][0], loss_on), [row("a", "b"), many, row("a", "b")], 64, facts))
    assert [one.row for one in found] == [0, 2]
    assert (facts["without_targets"], facts["refused_by_template"]) == (1, 1)
    [told] = facts["left_out"]
    assert told["row"] == many.key.hex()
    assert "it is too long a conversation, to be split into several: 10,000 of its answers" in told["reason"]


def test_texts_of_one_answer_each_are_left_out_where_they_are_too_much_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [found] = TemplateEncoder(KNOWN["qwen-3"][0], "answers").encode([CHATS[0]])
    assert len(found) == 3
    monkeypatch.setattr(template, "_UNROLLED", 100)
    [reason] = TemplateEncoder(KNOWN["qwen-3"][0], "answers").encode([CHATS[0]])
    assert isinstance(reason, str)
    assert "3 of its answers are to be rendered, each in a text of its own" in reason
    [[_]] = TemplateEncoder(KNOWN["chatml"][0], "answers").encode([CHATS[0]])  # one text
    [[_]] = TemplateEncoder(KNOWN["qwen-3"][0], "answers").encode([row("a", "b" * 200)])  # the only one


@pytest.mark.parametrize("name", ["qwen-3", "mistral"])
def test_each_answer_of_a_long_conversation_stays_as_it_is_at_the_end_of_a_shorter_one(name: str) -> None:
    system = "be brief"
    contents = TEXTS[:24]
    encoder = TemplateEncoder(KNOWN[name][0], "answers")
    [found] = encoder.encode([row(*contents, system=system)])
    assert len(found) == 12
    for place, items in enumerate(encoder.encode([row(*contents[:end], system=system) for end in range(2, 26, 2)])):
        assert items[-1] == found[place]


def test_an_honest_conversation_of_some_hundred_turns_stays() -> None:
    honest: list[dict[str, Any]] = [{"role": role, "content": "a" * 1200} for role in ("user", "assistant") * 200]
    template.check_work(honest, (), 200)


def test_texts_of_one_conversation_are_made_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TemplateEncoder(KNOWN["qwen-3"][0], "answers")
    texts = iter(encoder.template.answers(CHATS[0].turns))
    next(texts)
    monkeypatch.setattr(encoder.template, "_text", lambda *_: "made late")
    assert [text.text for text in texts] == ["made late"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("most", "limit"), [(512, 400), (512, 1), (3, 1 << 20)])
def test_batches_end_by_their_bytes_and_change_no_token(
    kind: str, most: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = CHATS if kind == "pairs" else [*PLAIN, *CHATS, *PLAIN]
    expected = told(read(kind, rows, before := {}))
    assert expected
    monkeypatch.setattr(chat, "_BATCH", most)
    monkeypatch.setattr(chat, "_BATCH_BYTES", limit)
    assert told(read(kind, rows, after := {})) == expected
    assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_rows_are_read_than_a_batch_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of books at once would fill a pod."""
    monkeypatch.setattr(chat, "_BATCH_BYTES", 4 * max(len(str(one.messages)) for one in CHATS))
    taken = 0

    def counted() -> Iterator[Row]:
        nonlocal taken
        for one in CHATS * 10:
            taken += 1
            yield one

    next(read(kind, counted(), {}))
    assert taken < 50


def test_a_row_larger_than_a_batch_is_one_alone() -> None:
    texts = ["a" * (5 << 20), "b", "c" * (3 << 20), "é" * (1 << 20), "d"]
    assert [[text[0] for text in batch] for batch in chat.in_batches(texts, lambda text: [text])] == [
        ["a"],
        ["b", "c"],
        ["é", "d"],
    ]


def test_a_plain_text_has_no_places_of_its_tokens_in_memory() -> None:
    """They take more than the tokens, and tell where answers stand."""
    encoder = TemplateEncoder(KNOWN["chatml"][0], "answers")
    [(ids, places)], [(same, found)] = (encoder._tokenise(TEXTS[:1], special) for special in (True, False))
    assert ids == same
    assert (len(places), len(found)) == (0, len(ids))


PLACES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(tuple)


@given(offsets=st.lists(PLACES), spans=st.lists(PLACES, max_size=5), in_order=st.booleans())
def test_tokens_of_spans_are_those_that_share_a_character(
    offsets: list[tuple[int, int]], spans: list[tuple[int, int]], in_order: bool
) -> None:
    order: Callable[[Any], Any] = sorted if in_order else list
    offsets, spans = order(offsets), order(spans)
    expected = {
        place for low, high in spans for place, (begin, end) in enumerate(offsets) if end > low and begin < high
    }
    assert chat._spanned(offsets, spans)[0] == sorted(expected)


@given(sizes=st.lists(st.integers(0, 3)), cuts=st.lists(st.integers(0, 30), max_size=8, unique=True).map(sorted))
def test_spans_that_begin_within_a_token_are_counted(sizes: list[int], cuts: list[int]) -> None:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    offsets = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    first = [next((begin for begin, end in offsets if end > low and begin < high), None) for low, high in spans]
    merged = sum(begin is not None and begin < low for begin, (low, _) in zip(first, spans, strict=True))
    assert chat._spanned(offsets, spans)[1] == merged
