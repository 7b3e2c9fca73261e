"""Rows become documents with a label: what a classifier reads, and which of the known labels it is to give.

Texts are tokenised as a pipeline of transformers does it, special tokens and truncation included, so that the model
reads in use what it has read in training. Conversations are rendered by the tokenizer's chat template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from dropforge.dataset import MOST_LABEL_CHARS, MOST_LABELS
from dropforge.errors import DataError, RecipeError
from dropforge.json_objects import MOST
from dropforge.store import MissingObjectError, Store, read_bounded
from trainer.data.chat import COUNTS, Document, count_unwritten, in_batches, leave_out
from trainer.data.rows import Row
from trainer.data.template import ChatTemplate, UnusableChatError
from trainer.data.tokenizer import no_panic, unknown_id

LABELS: Final = "labels.json"  # in the run's folder
#: In a trained classifier's tokenizer_config.json: what `model_max_length` was before it became what its rows had.
MADE_FOR: Final = "base_model_max_length"
_TOLD: Final = 5  # labels that a message names
_ROLES: Final = (
    "{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] + '\\n' }}{% endfor %}"
)


def find_labels(rows: Iterable[Row], name: str) -> tuple[str, ...]:
    """The labels of training rows, in the order of their code points: the same for any order of the rows.

    :param name: of the rows, for messages.
    :raises DataError: if there are not at least two, or so many that nothing tells what they have in common, or too
        many for a model.
    """
    found: Counter[str] = Counter()
    chars = 0
    for row in rows:
        if row.label is None:
            continue
        chars += 0 if row.label in found else len(row.label)
        found[row.label] += 1
        if len(found) > MOST_LABELS or chars > MOST_LABEL_CHARS:
            many = len(found) > MOST_LABELS
            much = f"{MOST_LABELS:,} labels" if many else f"{MOST_LABEL_CHARS:,} characters of labels"
            raise DataError(
                name,
                f"its rows have more than {much}, so many that a classifier would not fit ({told(sorted(found))})",
                "Give rows of a kind the same short `label`",
            )
    if len(found) < 2:
        cause = f"all of its rows have the label {told(found)}" if found else "none of its rows has a label"
        raise DataError(name, cause, "Give rows a `label`, at least two different ones")
    if max(found.values()) == 1:
        raise DataError(
            name,
            f"each of its {len(found)} rows has a label of its own ({told(sorted(found))}), so there are no classes",
            "Give rows of a kind the same `label`",
        )
    return tuple(sorted(found))


def choose_labels(found: Sequence[str], head: Sequence[str] | None, *, goes_on: bool = False) -> tuple[str, ...]:
    """The labels of the model: those of the rows, or those of the head that the base model brings, in its order.

    :param head: labels of the base model's own head, if it is a classifier already.
    :param goes_on: whether this is the head of an earlier run (`base.start`).
    :raises RecipeError: if the head does not know a label of the rows.
    """
    if head is None:
        return tuple(found)
    strange = sorted(set(found) - set(head))
    if strange:
        raise RecipeError(
            f"recipe key `base.{'start' if goes_on else 'model'}`",
            f"it is a classifier that knows the labels {told(head)}, and {len(strange)} label(s) of the training rows "
            f"are not among them: {told(strange)}",
            "Give rows the labels that it knows, or set `base.start: base` for a head of the new ones"
            if goes_on
            else "Name rows as its config's `id2label` does, or name the base model without a head",
        )
    return tuple(head)


def told(labels: Iterable[str]) -> str:
    """The first few of some labels, for a message."""
    names = list(labels)
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(repr(name[:60]) for name in names[:_TOLD]) + more


def read_labels(run: Store) -> tuple[str, ...] | None:
    """The labels in a run's folder, in the order of their numbers; None if there are none."""
    try:
        return tuple(json.loads(read_bounded(run, LABELS, MOST)))
    except MissingObjectError:
        return None


def for_labels(tokenizer: Any) -> Any:
    """A tokenizer as a classifier uses and saves it: padding at the right, and a way to write a conversation.

    :raises DataError: if it has nothing to pad with: a decoder could not tell where its text ends.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"tokenizer of {tokenizer.name_or_path or 'the base model'}",
                "it has neither a padding token nor an end token, so the last token of a text could not be found",
                "Set `pad_token` in its tokenizer_config.json",
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    if not tokenizer.chat_template:
        tokenizer.chat_template = _ROLES
    return tokenizer


def made_for(tokenizer: Any) -> Any:
    """Return how many tokens a tokenizer is made for, also where it was saved with a classifier that read fewer."""
    before, now = tokenizer.init_kwargs.get(MADE_FOR), tokenizer.model_max_length
    return max(before, now) if isinstance(before, int | float) else now


def labelled_documents(
    tokenizer: Any, labels: Sequence[str], rows: Iterable[Row], length: int, facts: dict[str, Any]
) -> Iterator[Document]:
    """One document for each row that has a known label, cut to `length` tokens as the tokenizer cuts.

    :param facts: gains what `trainer.data.chat.documents` counts; `cut_rows`, which are longer than a row;
        `unseen_labels`, the rows left out because no training row has their label; and under `labels` the rows of each.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    for key in (*COUNTS, "cut_rows", "unseen_labels"):
        facts.setdefault(key, 0)
    each: dict[str, int] = facts.setdefault("labels", dict.fromkeys(labels, 0))
    facts.setdefault("left_out", [])
    reader, unknown = _Reader(tokenizer, length), unknown_id(tokenizer)
    for index, row, found in reader.each(rows):
        facts["rows"] += 1
        if row.label is None:
            leave_out(row, "it has no label", facts)
        elif row.label not in numbers:
            facts["unseen_labels"] += 1
            leave_out(row, f"no training row has its label {row.label[:60]!r}", facts)
        elif isinstance(found, str):
            facts["refused_by_template"] += 1
            leave_out(row, found, facts)
        elif not len(found.ids):
            leave_out(row, "it has no token", facts)
        else:
            count_unwritten(reader.unwritten(row), facts)
            facts["documents"] += 1
            facts["tokens"] += len(found.ids)
            facts["targets"] += 1
            facts["cut_rows"] += found.cut
            facts["unknown_letters"] += unknown is not None and bool((found.ids == unknown).any())
            each[row.label] += 1
            nothing = np.zeros(len(found.ids), dtype=np.bool_)
            yield Document(index, found.ids, nothing, numbers[row.label])


class _Read:
    """A row's ids, and whether there were more of them."""

    def __init__(self, ids: Sequence[int], cut: bool) -> None:
        self.ids, self.cut = np.array(ids, dtype=np.int32), cut


class _Refused(str):
    """Why a row has no text."""


class _Reader:
    """Rows to ids, many at a time."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.template: ChatTemplate | None = None

    def each(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, _Read | str]]:
        """Each row with its index and its ids, or why it has none."""
        made = ((index, row, self._render(row)) for index, row in enumerate(rows))
        for batch in in_batches(made, lambda one: [one[2]]):
            found: list[_Read | str] = [text for _, _, text in batch]
            for chat in (False, True):  # templates write special tokens themselves
                some = [
                    place
                    for place, (_, row, text) in enumerate(batch)
                    if (row.text is None) == chat and not isinstance(text, _Refused)
                ]
                for place, one in zip(some, self._tokenise([batch[at][2] for at in some], not chat), strict=True):
                    found[place] = one
            for (index, row, _), item in zip(batch, found, strict=True):
                yield index, row, item

    def _render(self, row: Row) -> str:
        """The text of a row, or why it has none."""
        if row.text is not None:
            return row.text
        if self.template is None:  # looked at with the first conversation, because plain text needs none
            self.template = ChatTemplate(self.tokenizer)
        try:
            return self.template.whole(row.turns, row.tools)
        except UnusableChatError as error:
            return _Refused(error)

    def unwritten(self, row: Row) -> frozenset[str]:
        """See `Encoder.unwritten`; asked once a row has its text."""
        return frozenset() if self.template is None else self.template.unwritten(row.turns, row.tools)

    @no_panic()
    def _tokenise(self, texts: list[str], special: bool) -> list[_Read]:
        if not texts:
            return []
        found = self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        long = [place for place, ids in enumerate(found) if len(ids) > self.length]
        cut = {}
        if long:
            shorter = self.tokenizer(
                [texts[place] for place in long], add_special_tokens=special, truncation=True, max_length=self.length
            )
            cut = dict(zip(long, shorter["input_ids"], strict=True))
        return [_Read(cut.get(place, ids), place in cut) for place, ids in enumerate(found)]
