"""Rows become documents: token ids, and which of them are targets.

Two ways. A tokenizer of ours is fed piece by piece, so that text in a row can never turn into a special token and the
mask is exact. Any other one renders its own chat template (`trainer.data.template`). Targets are known by position, so
a padding token that equals the end token hides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError
from trainer.data.rows import Row
from trainer.data.template import UNWRITTEN, ChatTemplate, Rendered, UnusableChatError, check_work
from trainer.data.tokenizer import BOS, END, EOS, START, core, is_ours, no_panic, unknown_id

_BATCH: Final = 512
_BATCH_BYTES: Final = 4 << 20  # a byte of text takes 30 bytes and more while it is tokenised
_TEXT_BYTES: Final = 16  # what a text takes in the same measure, however short it is
Item = TypeVar("Item")
_EXAMPLES: Final = 5  # rows that a report names


@dataclass(frozen=True)
class Document:
    """One row's tokens. `trained[i]` says that token i is a target, predicted from the tokens before it.

    :param row: index of the row; a long text and an unrolled conversation give several documents.
    :param label: number of the row's label, which then is the only target.
    :param spelled: UTF-8 bytes of the row's own text that the targets stand for.
    """

    row: int
    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    label: int | None = None
    spelled: int = 0


@dataclass(frozen=True)
class Encoded:
    """A row's tokens in full length.

    :param spelled: UTF-8 bytes of the row's own text that the targets stand for, whatever the tokenizer.
    :param merged: answers whose first token also holds the end of their prompt.
    """

    ids: Sequence[int]
    trained: Sequence[bool]
    spelled: int
    merged: int = 0


class Encoder(Protocol):
    """Rows to ids and masks.

    :param unknown: id of letters that the tokenizer does not know; None if it knows all.
    """

    unknown: int | None

    def each(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, Encoded | str]]:
        """The index of a row, the row, and what is read of it or why nothing is; several in turn if it has several."""
        ...

    def encode(self, rows: Sequence[Row]) -> list[list[Encoded] | str]:
        """For each of a few rows all that is read of it, or why nothing is."""
        found: list[list[Encoded] | str] = []
        for _, some in groupby(self.each(rows), key=itemgetter(0)):
            items = [item for _, _, item in some]
            reasons = [item for item in items if isinstance(item, str)]
            found.append(reasons[0] if reasons else [item for item in items if not isinstance(item, str)])
        return found

    def unwritten(self, row: Row) -> frozenset[str]:
        """What a row says that is left out of its tokens, by names of `UNWRITTEN`."""
        ...


def make_encoder(tokenizer: Any, loss_on: str) -> Encoder:
    """The encoder for a tokenizer. :param loss_on: `answers` or `all`."""
    return OwnEncoder(core(tokenizer), loss_on) if is_ours(tokenizer) else TemplateEncoder(tokenizer, loss_on)


def spelled(row: Row, everything: bool) -> int:
    """UTF-8 bytes of a row's text; of a conversation the answers' alone, or everybody's."""
    if row.text is not None:
        return len(row.text.encode())
    silent, pairs = row.silent, enumerate(row.messages or ())
    texts = (text for turn, (role, text) in pairs if turn not in silent and (everything or role == "assistant"))
    return sum(len(text.encode()) for text in texts)


class OwnEncoder(Encoder):
    """For tokenizers trained here, which know all bytes. Special tokens come from the structure only."""

    unknown = None

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        vocabulary = self.tokenizer.get_vocab()
        self.bos, self.eos, self.start, self.end = (vocabulary[token] for token in (BOS, EOS, START, END))
        self.all = loss_on == "all"
        self.newline = self.tokenizer.encode("\n", add_special_tokens=False).ids

    def each(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, Encoded | str]]:
        made = ((index, row, _parts(row)) for index, row in enumerate(rows))
        for batch in in_batches(made, lambda one: one[2]):
            encoded = iter(self._tokenise([part for _, _, parts in batch for part in parts]))
            for index, row, _ in batch:
                item = Encoded(*self._join(row, encoded), spelled(row, self.all))
                yield index, row, _TOOLS if row.calls else item

    @no_panic()
    def _tokenise(self, parts: list[str]) -> list[Any]:
        return list(self.tokenizer.encode_batch_fast(parts, add_special_tokens=False))

    def unwritten(self, row: Row) -> frozenset[str]:
        """Nothing is written but roles and contents."""
        return unwritten_beside(row.beside)

    def prompt(self, before: Row) -> list[int]:
        """The tokens of a conversation up to where its next answer begins, as the training has them."""
        # The last target of an empty answer is its end, which stands where it would begin.
        row = Row(b"", (*(before.messages or ()), ("assistant", "")), None)
        [found] = self.encode([row])
        assert not isinstance(found, str)
        targets = [place for place, target in enumerate(found[0].trained) if target]
        return list(found[0].ids[: targets[-1]])

    def _join(self, row: Row, encoded: Iterator[Any]) -> tuple[list[int], list[bool]]:
        if row.text is not None:
            ids = [self.bos, *next(encoded).ids, self.eos]
            return ids, [False] + [True] * (len(ids) - 1)
        ids, trained = [self.bos], [False]

        def add(more: list[int], target: bool) -> None:
            ids.extend(more)
            trained.extend([target or self.all] * len(more))

        silent = row.silent
        for turn, (role, _) in enumerate(row.messages or ()):
            add([self.start], False)
            add(next(encoded).ids, False)
            if role != "assistant":
                add([self.end], False)
            elif turn not in silent:
                add(next(encoded).ids, True)
                add([self.end], True)
            else:  # also where all is learned
                more = [*next(encoded).ids, self.end]
                ids.extend(more)
                trained.extend([False] * len(more))
            add(self.newline, False)
        return ids, trained


def _parts(row: Row) -> list[str]:
    """The texts of a row that stand between special tokens."""
    if row.text is not None:
        return [row.text]
    parts: list[str] = []
    for role, content in row.messages or ():
        parts += [f"{role}\n", content] if role == "assistant" else [f"{role}\n{content}"]
    return parts


class TemplateEncoder(Encoder):
    """For tokenizers that came with a model."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        self.tokenizer = tokenizer
        self.all = loss_on == "all"
        self.unknown = unknown_id(tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; looked at with the first conversation, because plain text needs none."""
        template = ChatTemplate(self.tokenizer)
        if not self.all:
            template.check()
        return template

    def each(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, Encoded | str]]:
        made = ((index, row, item) for index, row in enumerate(rows) for item in self._texts(row))
        for batch in in_batches(made, lambda one: [] if isinstance(one[2], str) else [one[2].text]):
            some = [(row.text is None, item.text) for _, row, item in batch if not isinstance(item, str)]
            # Two calls for all: the tokenizer works on the texts side by side.
            plain = iter(self._tokenise([text for chat, text in some if not chat], special=True))
            # Templates write the begin token themselves: adding it again would double it.
            chats = iter(self._tokenise([text for chat, text in some if chat], special=False))
            for index, row, item in batch:
                if isinstance(item, str):
                    yield index, row, item
                else:
                    yield index, row, self._encoded(row, item, next(chats if row.text is None else plain))

    def _texts(self, row: Row) -> Iterable[Rendered | str]:
        """The texts of a row, or why it has none."""
        if row.text is not None:
            return [Rendered(row.text, (), spelled(row, self.all))]
        messages, tools, silent = row.turns, row.tools, row.silent
        try:
            if not self.all:
                return self.template.answers(messages, tools, silent)
            check_work(messages, tools, len(silent))
            text = self.template.whole(messages, tools)
            spans = tuple(self.template.span(text, messages, turn, tools) for turn in sorted(silent))
            if any(span is None for span in spans):
                return ["its chat template does not show where an answer is that is not to be learned"]
            learned = [turn for turn in range(len(messages)) if turn not in silent]
            said = sum(self.template.sizes(messages, learned, tools, whole=True))
            said += len(json.dumps(tools, ensure_ascii=False).encode()) if tools else 0
            return [Rendered(text, tuple(span for span in spans if span is not None), said)]
        except UnusableChatError as error:
            return [str(error)]

    def unwritten(self, row: Row) -> frozenset[str]:
        return frozenset() if row.messages is None else self.template.unwritten(row.turns, row.tools, self.all)

    @no_panic()
    def _tokenise(self, texts: list[str], special: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not texts:
            return []
        # Only what is used is asked for: it takes most of the memory. Nothing is left out of a plain text.
        more = {"return_attention_mask": False, "return_token_type_ids": False, "return_offsets_mapping": not special}
        found = self.tokenizer(texts, add_special_tokens=special, **more)
        return list(zip(found["input_ids"], [[]] * len(texts) if special else found["offset_mapping"], strict=True))

    def _encoded(self, row: Row, item: Rendered, tokens: tuple[list[int], list[tuple[int, int]]]) -> Encoded:
        ids, offsets = list(tokens[0]), tokens[1]
        eos = self.tokenizer.eos_token_id
        if row.text is not None and eos is not None and (not ids or ids[-1] != eos):
            ids.append(eos)
        inside, merged = _spanned(offsets, item.spans)
        if row.text is not None or self.all:
            trained = [False] + [True] * (len(ids) - 1)
            for place in inside:  # not to be learned
                trained[place] = False
            return Encoded(ids, trained, item.said)
        trained = [False] * len(ids)
        for place in inside:
            trained[place] = True
        return Encoded(ids, trained, item.said, merged)


def _spanned(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Places of the tokens that spans have a character of, and how many spans begin within a token.

    The first token of a span, which is not wholly the prompt's, is where the model has to begin. Both are gone through
    once, whatever their order, since a row may have very many of both.
    """
    if not spans:
        return [], 0
    flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int64, count=2 * len(offsets))
    begins, ends = flat[0::2], flat[1::2]
    lows, highs = np.array(sorted(spans), dtype=np.int64).T
    # The first span that ends behind a token's beginning has to begin before its end.
    inside = np.searchsorted(np.maximum.accumulate(highs), begins, "right") < np.searchsorted(lows, ends, "left")
    first = np.searchsorted(np.maximum.accumulate(ends), lows, "right")  # for each span
    known = first < len(begins)
    at = begins[first[known]]
    merged = np.count_nonzero((at < lows[known]) & (at < highs[known]))
    return np.flatnonzero(inside).tolist(), int(merged)


_BESIDE: Final = {"reasoning_content": "unwritten_thoughts", "name": "unwritten_names"}
_TOOLS: Final = "a tokenizer that was trained here writes no tool calls: take a base whose chat template does"


COUNTS: Final = (
    "rows",
    "documents",
    "tokens",
    "targets",
    "target_bytes",
    "split_texts",
    "cut_conversations",
    "cut_targets",
    "unrolled_conversations",
    "merged_at_border",
    "without_targets",
    "refused_by_template",
    *UNWRITTEN,
)


def documents(encoder: Encoder, rows: Iterable[Row], length: int, facts: dict[str, Any]) -> Iterator[Document]:
    """Encode rows into documents of at most `length` tokens.

    A long text is split and every token of it but the first is a target once; a long conversation keeps its beginning,
    or what leads to its last target if there is none at the beginning.

    :param facts: gains the counts `rows, documents, tokens, targets, target_bytes` (UTF-8 bytes of the rows' own text
        that the targets stand for), `split_texts, cut_conversations, cut_targets` (targets that were cut off),
        `unrolled_conversations, merged_at_border, without_targets` (rows that teach nothing) and, of those,
        `refused_by_template`; those of `UNWRITTEN` (rows of which the chat template leaves out something); and
        under `left_out` the first few that teach nothing, with the reason.
    """
    for key in COUNTS:
        facts.setdefault(key, 0)
    facts.setdefault("left_out", [])
    for index, some in groupby(encoder.each(rows), key=itemgetter(0)):
        facts["rows"] += 1
        reason = "no token of it is a target"
        made, cut, unknown = 0, facts["cut_conversations"], False
        for place, (_, row, item) in enumerate(some):
            if isinstance(item, str):
                reason = item
                facts["refused_by_template"] += 1
                continue
            if not place:
                count_unwritten(encoder.unwritten(row), facts)
            facts["unrolled_conversations"] += place == 1
            facts["merged_at_border"] += item.merged
            unknown = unknown or (encoder.unknown is not None and encoder.unknown in item.ids)
            for document in _cut(row, index, item, length, facts):
                made += 1
                yield document
        facts["unknown_letters"] += unknown
        facts["cut_conversations"] = min(facts["cut_conversations"], cut + 1)  # several answers of it may be
        if not made:
            leave_out(row, reason, facts)


def in_batches(items: Iterable[Item], texts: Callable[[Item], Sequence[str]]) -> Iterator[list[Item]]:
    """Several at a time, because that is faster, but so many only that their tokens fit into memory.

    :param texts: what will be tokenised of each.
    """
    batch: list[Item] = []
    held = 0
    for item in items:
        size = sum(len(text.encode(errors="replace")) + _TEXT_BYTES for text in texts(item))
        if batch and (len(batch) == _BATCH or held + size > _BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def unwritten_beside(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """What messages say beside their contents, where those alone are written, by names of `UNWRITTEN`."""
    return frozenset(name for message in messages for key, name in _BESIDE.items() if key in message)


def count_unwritten(names: Iterable[str], facts: dict[str, Any]) -> None:
    """Count a row under all that its chat template leaves out of it. :param names: of `UNWRITTEN`."""
    for name in names:
        facts[name] += 1


def leave_out(row: Row, reason: str, facts: dict[str, Any]) -> None:
    """Count a row that teaches nothing, and keep the first few with the reason."""
    facts["without_targets"] += 1
    if len(facts["left_out"]) < _EXAMPLES:
        facts["left_out"].append({"row": row.key.hex(), "reason": reason})


def tell_left_out(what: str, facts: Mapping[str, Any]) -> str:
    """How many rows a model does not read, with the first one and the reason; empty if none."""
    lost = facts.get("without_targets")
    if not lost:
        return ""
    first = facts["left_out"][0]
    return f"{lost} of {facts['rows']} {what} are left out (row {first['row']}: {first['reason']})"


def check_left_out(name: str, facts: Mapping[str, Any], share: float) -> None:
    """:raises DataError: if more than `share` of the rows teach nothing, with the first few and the reasons."""
    rows, lost = facts["rows"], facts["without_targets"]
    if lost <= share * rows:
        return
    examples = "; ".join(f"row {item['row']}: {item['reason']}" for item in facts["left_out"])
    raise DataError(
        name,
        f"{lost} of {rows} rows teach nothing, more than the share of {share:g} that may ({examples})",
        "Fix the rows, raise `train.sequence_length` if they are longer, or raise `data.max_left_out`",
    )


def _cut(row: Row, index: int, item: Encoded, length: int, facts: dict[str, Any]) -> Iterator[Document]:
    """The documents of one encoded row, counted."""
    trained = np.array(item.trained, dtype=np.bool_)
    trained[:1] = False  # nothing comes before the first token
    ids = np.array(item.ids, dtype=np.int32)
    before = [0, *accumulate(trained.tolist())]  # targets before each place
    for low, high in _pieces(row, trained, length, facts):
        mask = trained[low:high].copy()
        if low:
            mask[0] = False  # context only: a target of the piece before, or nothing comes before it
        first, last = before[low + bool(low)], before[high]
        if last == first:
            continue
        facts["documents"] += 1
        facts["tokens"] += high - low
        facts["targets"] += last - first
        # Shares of one whole, cut at the same places from both sides: pieces add up to it.
        said = item.spelled * last // before[-1] - item.spelled * first // before[-1]
        facts["target_bytes"] += said
        if row.text is None:
            facts["cut_targets"] += before[-1] - (last - first)
        yield Document(index, ids[low:high], mask, spelled=said)


def _pieces(row: Row, trained: NDArray[np.bool_], length: int, facts: dict[str, Any]) -> list[tuple[int, int]]:
    size = len(trained)
    if size <= length:
        return [(0, size)]
    if row.text is not None:
        facts["split_texts"] += 1
        # The last token of a piece is the context of the next one's first: no target is lost.
        return [(low, min(low + length, size)) for low in range(0, size - 1, length - 1)]
    facts["cut_conversations"] += 1
    if trained[:length].any():
        return [(0, length)]
    end = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else size
    return [(end - length, end)]
