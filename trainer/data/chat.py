"""Rows become documents: token ids, and which of them are targets.

Two ways. A tokenizer of ours is fed piece by piece, so that text in a row can never turn into a special token and the
mask is exact. Any other one renders its own chat template; without generation markers in it, the mask is what an
assistant's turn adds to the rendered prompt. Targets are known by position, so a padding token that equals the end
token hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError
from trainer.data.rows import Row
from trainer.data.tokenizer import BOS, END, EOS, PLAIN_TEMPLATE, START, core, is_ours

_BATCH = 512


@dataclass(frozen=True)
class Document:
    """One row's tokens. `trained[i]` says that token i is a target, predicted from the tokens before it.

    :param row: index of the row; a long text gives several documents.
    """

    row: int
    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


class Encoder(Protocol):
    """Rows to ids and masks of full length."""

    def encode(self, rows: list[Row]) -> list[tuple[list[int], list[bool]]]: ...


def make_encoder(tokenizer: Any, loss_on: str) -> Encoder:
    """The encoder for a tokenizer. :param loss_on: `answers` or `all`."""
    return OwnEncoder(core(tokenizer), loss_on) if is_ours(tokenizer) else TemplateEncoder(tokenizer, loss_on)


class OwnEncoder:
    """For tokenizers trained here. Special tokens come from the structure only."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        vocabulary = self.tokenizer.get_vocab()
        self.bos, self.eos, self.start, self.end = (vocabulary[token] for token in (BOS, EOS, START, END))
        self.all = loss_on == "all"
        self.newline = self.tokenizer.encode("\n", add_special_tokens=False).ids

    def encode(self, rows: list[Row]) -> list[tuple[list[int], list[bool]]]:
        pieces: list[str] = []
        for row in rows:
            if row.text is not None:
                pieces.append(row.text)
            for role, content in row.messages or ():
                pieces += [f"{role}\n", content] if role == "assistant" else [f"{role}\n{content}"]
        encoded = iter(self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
        return [self._join(row, encoded) for row in rows]

    def _join(self, row: Row, encoded: Iterator[Any]) -> tuple[list[int], list[bool]]:
        if row.text is not None:
            ids = [self.bos, *next(encoded).ids, self.eos]
            return ids, [False] + [True] * (len(ids) - 1)
        ids, trained = [self.bos], [False]

        def add(more: list[int], target: bool) -> None:
            ids.extend(more)
            trained.extend([target or self.all] * len(more))

        for role, _ in row.messages or ():
            add([self.start], False)
            add(next(encoded).ids, False)
            if role == "assistant":
                add(next(encoded).ids, True)
            add([self.end], role == "assistant")
            add(self.newline, False)
        return ids, trained


class TemplateEncoder:
    """For tokenizers that came with a model."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        self.tokenizer = tokenizer
        self.template = tokenizer.chat_template or PLAIN_TEMPLATE
        if not isinstance(self.template, str):
            raise DataError("tokenizer", "it has several chat templates", "Save it with one `chat_template`")
        self.all = loss_on == "all"
        self.markers = "{% generation" in self.template.replace("{%-", "{%")

    def encode(self, rows: list[Row]) -> list[tuple[list[int], list[bool]]]:
        return [self._text(row.text) if row.text is not None else self._chat(row) for row in rows]

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        ids = list(self.tokenizer(text)["input_ids"])
        eos = self.tokenizer.eos_token_id
        if eos is not None and (not ids or ids[-1] != eos):
            ids.append(eos)
        return ids, [False] + [True] * (len(ids) - 1)

    def _chat(self, row: Row) -> tuple[list[int], list[bool]]:
        messages = [{"role": role, "content": content} for role, content in row.messages or ()]
        text = self._render(messages)
        # The template writes the begin token itself: adding it again would double it.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if self.all:
            return ids, [False] + [True] * (len(ids) - 1)
        if self.markers:
            answer = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return list(answer["input_ids"]), [bool(item) for item in answer["assistant_masks"]]
        spans = [self._span(text, messages, turn) for turn, item in enumerate(messages) if item["role"] == "assistant"]
        # A token that straddles the border belongs to the prompt.
        inside = [any(low <= begin and end <= high for low, high in spans) for begin, end in encoded["offset_mapping"]]
        return ids, inside

    def _span(self, text: str, messages: list[dict[str, str]], turn: int) -> tuple[int, int]:
        """Characters that assistant turn `turn` adds: from the end of the prompt to the end of the turn."""
        before = self._render(messages[:turn], prompt=True)
        # What stands between the end of the turn and the next one is not the model's to say.
        after = self._render(messages[: turn + 1]).rstrip()
        if not text.startswith(before):  # templates may rewrite earlier turns: find the content itself
            begin = text.rfind(messages[turn]["content"])
            return (begin, begin + len(messages[turn]["content"])) if begin >= 0 else (0, 0)
        return len(before), len(after) if text.startswith(after) else len(text)

    def _render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        if not messages and not prompt:
            return ""
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
            )
        )


def documents(encoder: Encoder, rows: Iterable[Row], length: int, counts: dict[str, int]) -> Iterator[Document]:
    """Encode rows into documents of at most `length` tokens.

    A long text is split and loses nothing; a long conversation keeps its beginning, or its end if only that has
    targets. `counts` gains rows, split_texts, cut_conversations and without_targets (rows that teach nothing).
    """
    for key in ("rows", "documents", "tokens", "targets", "split_texts", "cut_conversations", "without_targets"):
        counts.setdefault(key, 0)
    source = iter(rows)
    index = 0
    while chunk := list(islice(source, _BATCH)):
        for row, (ids, trained) in zip(chunk, encoder.encode(chunk), strict=True):
            counts["rows"] += 1
            found = False
            for low, high in _pieces(row, trained, length, counts):
                mask = np.array(trained[low:high], dtype=np.bool_)
                mask[:1] = False  # nothing comes before the first token
                if mask.any():
                    found = True
                    counts["documents"] += 1
                    counts["tokens"] += high - low
                    counts["targets"] += int(mask.sum())
                    yield Document(index, np.array(ids[low:high], dtype=np.int32), mask)
            counts["without_targets"] += not found
            index += 1


def _pieces(row: Row, trained: list[bool], length: int, counts: dict[str, int]) -> list[tuple[int, int]]:
    size = len(trained)
    if size <= length:
        return [(0, size)]
    if row.text is not None:
        counts["split_texts"] += 1
        return [(low, min(low + length, size)) for low in range(0, size, length)]
    counts["cut_conversations"] += 1
    return [(0, length)] if any(trained[1:length]) else [(size - length, size)]
