"""What happens to the texts of rows between their canonical form and their keys: stages, one after another.

A stage is a pure function from a batch of passages to the same passages, changed where need be, the rows that end
there, and counters. It sees neither files nor places, so no cut of the rows into batches may change what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from curation import turns
from curation.canonical import Row, clean
from curation.columns import integers, strings
from curation.reasons import Reason, RejectError
from curation.tokens import blank, invisible
from dropforge.errors import DropforgeError

#: The texts of a batch of rows, in order: a message each, or a text, whose role is null. `row` counts from 0; `beside`
#: is what a message says beside its content, thoughts and calls, as JSON text (`curation.turns`), or null.
PASSAGES: Final = pa.schema(
    [("row", pa.int64()), ("role", pa.string()), ("content", pa.string()), ("beside", pa.string())]
)
#: Rows that end in a stage, each once and in order: a code of the ledger, and what was found, which never quotes them.
REFUSED: Final = pa.schema([("row", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])


class Staged(NamedTuple):
    """
    :param passages: the same rows and roles in the same order as they came, also those of rows that end here: what is
        shown of these is taken from here.
    :param refused: of the schema `REFUSED`. :param counts: what the card shows, added up over all batches.
    """

    passages: pa.RecordBatch
    refused: pa.RecordBatch
    counts: Mapping[str, int]


Stage = Callable[[pa.RecordBatch], Staged]


class Refusal(NamedTuple):
    """A row that ended in a stage. :param text: its first text as that stage left it."""

    reason: str
    detail: str
    text: str


def refusals(rows: Sequence[int], reasons: Sequence[str], details: Sequence[str]) -> pa.RecordBatch:
    """The batch of rows that a stage ends."""
    return pa.RecordBatch.from_arrays([integers(rows), strings(reasons), strings(details)], schema=REFUSED)


def put_through(rows: Sequence[Row], stages: Sequence[Stage]) -> tuple[list[Row | Refusal], dict[str, int]]:
    """Each row as the stages leave it, or why it ended, and the counters.

    :raises DropforgeError: if a stage loses or adds passages.
    """
    counts: Counter[str] = Counter()
    ended: dict[int, Refusal] = {}
    passages = _passages(rows)
    for stage in stages:
        passages, refused, more = _checked(stage, passages)
        counts.update(more)
        if refused.num_rows:
            ended |= _ended(passages, refused)
            gone = set(ended)
            kept = [at for at, row in enumerate(passages.column("row").to_pylist()) if row not in gone]
            passages = passages.take(integers(kept))
    texts: dict[int, list[str]] = {}
    said: dict[int, list[str]] = {}
    for row, content, beside in zip(*(passages.column(name).to_pylist() for name in _LEFT), strict=True):
        texts.setdefault(row, []).append(content)
        said.setdefault(row, []).append(beside or "")
    return [ended.get(at) or _changed(row, texts[at], said[at]) for at, row in enumerate(rows)], dict(counts)


_LEFT: Final = ("row", "content", "beside")


def _passages(rows: Sequence[Row]) -> pa.RecordBatch:
    numbers: list[int] = []
    roles: list[str | None] = []
    contents: list[str] = []
    said: list[str | None] = []
    for at, row in enumerate(rows):
        if row.text is None:
            numbers += [at] * len(row.roles)
            roles += row.roles
            contents += row.contents
            said += [beside or None for beside in row.beside] or [None] * len(row.roles)
        else:
            numbers.append(at)
            roles.append(None)
            contents.append(row.text)
            said.append(None)
    return passages_of(numbers, roles, contents, said)


def passages_of(
    rows: Sequence[int], roles: Sequence[str | None], contents: Sequence[str], beside: Sequence[str | None] = ()
) -> pa.RecordBatch:
    """A batch of passages; without `beside`, messages say nothing but their contents."""
    columns = [integers(rows), strings(roles), strings(contents), strings(beside or [None] * len(rows))]
    return pa.RecordBatch.from_arrays(columns, schema=PASSAGES)


def _checked(stage: Stage, passages: pa.RecordBatch) -> Staged:
    staged = stage(passages)
    same = staged.passages.schema == PASSAGES and staged.refused.schema == REFUSED
    if not same or any(not staged.passages.column(name).equals(passages.column(name)) for name in ("row", "role")):
        raise DropforgeError(
            f"curation's stage {getattr(stage, '__name__', type(stage).__name__)}",
            "it gave other passages than it was given",
            "A stage returns each passage, also those of rows that it refuses, in the same order",
        )
    return staged


def _ended(passages: pa.RecordBatch, refused: pa.RecordBatch) -> dict[int, Refusal]:
    first: dict[int, int] = {}
    for at, row in enumerate(passages.column("row").to_pylist()):
        first.setdefault(row, at)
    return {
        item["row"]: Refusal(item["reason"], item["detail"], passages.column("content")[first[item["row"]]].as_py())
        for item in refused.to_pylist()
    }


def _changed(row: Row, texts: Sequence[str], said: Sequence[str]) -> Row | Refusal:
    """The row with new texts, which may have become empty, or may hold control tokens that were none before.

    :param said: beside each of them.
    """
    if row.beside and said != [*row.beside]:
        try:
            row = row._replace(beside=tuple(turns.with_texts(one, lambda text: clean(text)[0]) for one in said))
        except RejectError as error:
            return Refusal(error.reason, error.detail, "")
    if texts == ([*row.contents] if row.text is None else [row.text]):
        return row
    roles: list[str] = []
    cleaned, touched = [], row.neutralised
    beside: list[str] = []
    for at, (role, text) in enumerate(zip(row.roles or ("",), texts, strict=True)):
        if blank(text) and (row.text is not None or not blank(row.contents[at])):  # a call has no content
            if role == "system":
                continue  # as of a row that came with an empty one
            reason = Reason.NO_ANSWER if role == "assistant" else Reason.EMPTY
            return Refusal(reason, f"nothing is left of {f'a message of {role}' if role else 'the text'}", "")
        try:
            harmless, count = clean(text)
        except RejectError as error:
            return Refusal(error.reason, error.detail, "")
        roles.append(role)
        beside += row.beside[at : at + 1]
        cleaned.append(harmless)
        touched += count
    unseen = any(map(invisible, cleaned))
    if row.text is None:
        row = row._replace(roles=tuple(roles), contents=tuple(cleaned), beside=tuple(beside))
    else:
        row = row._replace(text=cleaned[0])
    return row._replace(neutralised=touched, invisible=unseen)
