"""Rows become a source and a target: what an encoder reads, and what a decoder is to write.

The target is a row's last answer and the source all before it, both tokenised as transformers does it for a model in
use. A document holds them end to end, the target's tokens being its targets: so whatever counts, plans or proves
documents need not know of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from dropforge.errors import DataError
from trainer.data.chat import COUNTS, Document, count_unwritten, in_batches, leave_out, unwritten_beside
from trainer.data.prompts import held_out
from trainer.data.rows import Row
from trainer.data.template import ChatTemplate, UnusableChatError
from trainer.data.tokenizer import is_ours, no_panic, unknown_id

# One message is the source as it stands, as the T5 paper has it (https://arxiv.org/abs/1910.10683, section 2.4); of
# several each has its role before it.
TEMPLATE: Final = (
    "{% if messages | length == 1 %}{{ messages[0]['content'] }}{% else %}"
    "{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% endif %}"
)
_SHARE: Final = 2  # a target has half of a row for itself, and more where its source leaves it


def for_seq2seq(tokenizer: Any) -> Any:
    """A tokenizer as an encoder-decoder uses and saves it: a template of its own stays, else it gets `TEMPLATE`.

    :raises DataError: if it marks texts with their languages, as NLLB's and mBART's do, and was not told which: it
        would write one of its own into every source and target.
    """
    if hasattr(tokenizer, "set_tgt_lang_special_tokens"):
        missing = [name for name in ("src_lang", "tgt_lang") if not tokenizer.init_kwargs.get(name)]
        if missing:
            raise DataError(
                f"tokenizer of {tokenizer.name_or_path or 'the base model'}",
                f"it marks texts with their languages, and tokenizer_config.json names no {' and no '.join(missing)}",
                "Name both there, as eng_Latn and deu_Latn, in a copy of the model, and the copy in `base.model`",
            )
    if not tokenizer.chat_template or is_ours(tokenizer):
        tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "right"
    return tokenizer


class Sources:
    """Messages before an answer to what the encoder reads. :param tokenizer: see `for_seq2seq`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = tokenizer.chat_template == TEMPLATE  # other templates write special tokens themselves

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def text(self, before: Row) -> str:
        """:raises UnusableChatError: if the template refuses the conversation, or leaves out its tools."""
        return self.template.prompt(before.turns, before.tools)

    @no_panic()
    def ids(self, texts: list[str], longest: int | None = None) -> list[list[int]]:
        """:param longest: tokens, cut as the tokenizer cuts."""
        if not texts:
            return []
        cut = {} if longest is None else {"truncation": True, "max_length": longest}
        return list(self.tokenizer(texts, add_special_tokens=self.special, verbose=False, **cut)["input_ids"])

    def ask(self, before: Row) -> tuple[str, tuple[int, ...]] | None:
        """A prompt's text and tokens; None if the template refuses it."""
        try:
            text = self.text(before)
        except UnusableChatError:
            return None
        return text, tuple(self.ids([text])[0])


@dataclass(frozen=True)
class _Pair:
    """What a row says in full length. :param text: of the source."""

    text: str
    answer: str
    source: Sequence[int]
    target: Sequence[int]

    @property
    def said(self) -> int:
        """UTF-8 bytes of the answer."""
        return len(self.answer.encode())


def pairs(tokenizer: Any, rows: Iterable[Row], length: int, facts: dict[str, Any]) -> Iterator[Document]:
    """One document for each row that has an answer to something.

    Together they have at most `length` tokens. A target keeps its beginning, half of the row at least if it is so
    long; a source is cut as the tokenizer cuts.

    :param tokenizer: see `for_seq2seq`. :param length: tokens of a row, from 4 on.
    :param facts: gains what `trainer.data.chat.documents` counts, and `source_tokens`.
    """
    for key in (*COUNTS, "source_tokens"):
        facts.setdefault(key, 0)
    facts.setdefault("left_out", [])
    reader, unknown = _Reader(tokenizer), unknown_id(tokenizer)
    for index, row, found in reader.each(rows):
        facts["rows"] += 1
        if isinstance(found, str):
            facts["refused_by_template"] += found.startswith(_REFUSED)
            leave_out(row, found, facts)
            continue
        most = max(length // _SHARE, length - len(found.source))
        target = found.target[:most]
        room = length - len(target)
        source = found.source
        if len(source) > room:
            source = reader.sources.ids([found.text], room)[0]
        if not source:
            leave_out(row, "its prompt has no token", facts)
            continue
        count_unwritten(reader.unwritten(row), facts)
        lacking = unknown is not None and (unknown in found.source or unknown in found.target)
        facts["unknown_letters"] += lacking
        facts["changed_answers"] += not lacking and reader.changed(found)
        lost = len(found.target) - len(target)
        facts["documents"] += 1
        facts["tokens"] += len(source) + len(target)
        facts["source_tokens"] += len(source)
        facts["targets"] += len(target)
        said = found.said * len(target) // len(found.target)
        facts["target_bytes"] += said
        facts["cut_conversations"] += bool(lost) or len(source) < len(found.source)
        facts["cut_targets"] += lost
        trained = np.zeros(len(source) + len(target), dtype=np.bool_)
        trained[len(source) :] = True
        yield Document(index, np.array([*source, *target], dtype=np.int32), trained, spelled=said)


_REFUSED: Final = "the chat template refuses it"


def _answer(row: Row, before: Row) -> dict[str, Any]:
    """The message behind those before it."""
    return row.turns[len(before.messages or ())]


class _Reader:
    """Rows to pairs, many at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.sources = tokenizer, Sources(tokenizer)

    def each(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, _Pair | str]]:
        """Each row with its index and its pair, or why it has none."""
        made = ((index, row, self._asked(row)) for index, row in enumerate(rows))
        for batch in in_batches(made, lambda one: [] if isinstance(one[2], str) else one[2]):
            asked = [found for _, _, found in batch if not isinstance(found, str)]
            sources = iter(self.sources.ids([text for text, _ in asked]))
            targets = iter(self._targets([answer for _, answer in asked]))
            for index, row, found in batch:
                if isinstance(found, str):
                    yield index, row, found
                else:
                    text, answer = found
                    yield index, row, _Pair(text, answer, next(sources), next(targets))

    def _asked(self, row: Row) -> tuple[str, str] | str:
        """The texts of source and target, or why a row has none."""
        parts = held_out(row)
        if parts is None:
            kind = "a text" if row.text is not None else "a conversation"
            return f"it is {kind} without an answer, which would be the target"
        # Also behind it, where a call has no content.
        place, silent = len(parts[0].messages or ()), row.silent
        if any("tool_calls" in said for turn, said in enumerate(row.turns) if turn >= place and turn not in silent):
            return "its answer calls tools, and the target of an encoder-decoder is text alone"
        try:
            return self.sources.text(parts[0]), parts[1]
        except UnusableChatError as error:
            return str(error)

    def changed(self, pair: _Pair) -> bool:
        """Whether the tokens of an answer are read as another text, but for white space at its ends."""
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return bool(self.tokenizer.decode(pair.target, **how).strip() != pair.answer.strip())

    def unwritten(self, row: Row) -> frozenset[str]:
        """What a row with a pair says that is left out of it, by names of `UNWRITTEN`."""
        parts = held_out(row)
        assert parts is not None
        source = self.sources.template.unwritten(parts[0].turns, parts[0].tools)
        return source | unwritten_beside([_answer(row, parts[0])])

    @no_panic()
    def _targets(self, answers: list[str]) -> list[list[int]]:
        """Each ends with the end token, without which a model could not learn to stop."""
        if not answers:
            return []
        end = self.tokenizer.eos_token_id
        found = self.tokenizer(text_target=answers, verbose=False)["input_ids"]
        return [list(ids) if ids and ids[-1] == end else [*ids, end] for ids in found]
