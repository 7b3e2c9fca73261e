"""Rows without end: what one of them takes is bounded, and neither bounds nor batches change a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from trainer.data import chat
from trainer.data.chat import documents, make_encoder
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
