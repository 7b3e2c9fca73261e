"""What of a document is context, what is a target, and what ends a turn: tokens as stretches of text of one kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dropforge.text import escape, shorten
from trainer.commands.terminal import Paint
from trainer.data.rows import Row

Kind = Literal["context", "target", "end"]
_STYLES: dict[Kind, str] = {"context": "dim", "target": "green", "end": "magenta"}
# Where all tokens are targets, those that begin a turn are special too. The last one before context is an end anyway.
_ENDS: Final = frozenset(
    ("<|im_end|>", "<|eos|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>")
)
LEGEND = {
    "context": "read, not learned",
    "target": "learned",
    "end": "learned: the token that ends a turn or a text",
}


@dataclass(frozen=True)
class Segment:
    """A stretch of one kind. :param tokens: how many; 0 where no tokenizer was used."""

    kind: Kind
    text: str
    tokens: int


@dataclass(frozen=True)
class Sample:
    """A document as it is trained on, or a row without a tokenizer.

    :param row: index of the row in its split. :param key: its content key in hexadecimal; None where it is not known.
    :param tokens, targets: counts; 0 where no tokenizer was used.
    :param label: what a classifier is to say of it.
    """

    row: int
    key: str | None
    tokens: int
    targets: int
    segments: tuple[Segment, ...]
    label: str | None = None

    def plain(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def sample_of_tokens(
    row: int,
    key: str | None,
    ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    tokenizer: Any,
    label: str | None = None,
) -> Sample:
    """:param ids: (T,) token ids, :param trained: (T,) whether each is a target.

    :param label: of the row, if that is its target.
    """
    special = tokenizer.all_special_ids
    parts = tuple(split(ids.tolist(), trained.tolist(), special, tokenizer))
    return Sample(row, key, len(ids), int(trained.sum()), parts, label)


def split(ids: list[int], trained: list[bool], special: Sequence[int], tokenizer: Any) -> Iterable[Segment]:
    """Stretches of tokens of one kind, with their text.

    The text of a stretch is what it adds to the text before it: tokenizers of the SentencePiece kind drop the blank
    before a stretch that is decoded alone.
    """
    ends = {
        token
        for token, text in zip(special, tokenizer.convert_ids_to_tokens(list(special)), strict=True)
        if text in _ENDS
    }
    followed = [*trained[1:], False]
    kinds: list[Kind] = [
        "context" if not target else "end" if token in ends or (token in special and not more) else "target"
        for token, target, more in zip(ids, trained, followed, strict=True)
    ]
    place, before = 0, ""
    for kind, group in groupby(kinds):
        count = len(list(group))
        whole = _decode(tokenizer, ids[: place + count])
        alone = _decode(tokenizer, ids[place : place + count])
        yield Segment(kind, whole[len(before) :] if whole.startswith(before) else alone, count)
        place, before = place + count, whole


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def sample_of_row(row: int, content: Row, loss_on: str, *, labelled: bool = False) -> Sample:
    """A row by its turns, for want of a tokenizer. :param labelled: whether its label is its only target."""
    key, label = content.key.hex(), content.label if labelled else None
    if content.text is not None:
        return Sample(row, key, 0, 0, (Segment("context" if labelled else "target", content.text, 0),), label)
    segments = []
    for turn, (role, text) in enumerate(content.messages or ()):
        learned = not labelled and (loss_on == "all" or role == "assistant") and turn not in content.silent
        kind: Kind = "target" if learned else "context"
        calls = content.beside[turn].get("tool_calls") if content.beside else None
        shown = text + (json.dumps(calls, ensure_ascii=False) if calls else "")
        segments += [Segment("context", f"{role}: ", 0), Segment(kind, shown, 0), Segment("context", "\n", 0)]
    return Sample(row, key, 0, 0, tuple(segments), label)


def show(sample: Sample, paint: Paint, most: int) -> str:
    """A sample for people: running text in colour, or one line for each stretch where there is none.

    :param most: characters of a stretch that are shown; the middle of a longer one is left out.
    """
    if paint.colour:
        return "".join(paint(escape(shorten(part.text, most)), _STYLES[part.kind]) for part in sample.segments)
    lines = []
    for part in sample.segments:
        text = escape(shorten(part.text, most)).replace("\n", "\\n")
        lines.append(f"  {part.kind:<7} | {text}")
    return "\n".join(lines)


def head(sample: Sample) -> str:
    """One line about a sample."""
    told = f"row {sample.row}" + (f", key {sample.key}" if sample.key else "")
    if sample.label is not None:
        return f"{told}, {sample.tokens:,} tokens, label {escape(sample.label)}"
    return told + (f", {sample.tokens:,} tokens, {sample.targets:,} targets" if sample.tokens else "")


def legend(paint: Paint) -> str:
    """What the colours mean."""
    return "; ".join(f"{paint(kind, _STYLES[kind])}: {text}" for kind, text in LEGEND.items())  # type: ignore[index]
