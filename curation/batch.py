"""Canonical rows and faults of a split, gathered until they make a row group of Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from curation.canonical import Row
from curation.columns import binaries, booleans, integers, offsets, strings
from curation.continued import ANSWERS
from curation.fingerprint import TEXTS
from curation.identity import Answer
from curation.phrases import asked, numbers
from curation.task import Task

MESSAGES: Final = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ROWS: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("rank", pa.binary()),
        ("unit", pa.binary()),
        ("input", pa.binary()),
        ("file", pa.int64()),
        ("position", pa.int64()),
        ("chars", pa.int64()),
        ("words", pa.int64()),
        ("messages", MESSAGES),
        ("chat", pa.string()),
        ("text", pa.string()),
        ("label", pa.string()),
        ("source", pa.string()),
        ("group", pa.string()),
        ("extras", pa.string()),
        ("neutralised", pa.int64()),
        ("invisible", pa.int64()),
        ("opening", pa.int64()),
        ("closing", pa.int64()),
        ("answer", pa.binary()),
        ("layout", pa.int64()),
    ]
)
#: Columns of which a row holds one value.
_VALUES: Final = [name for name in ROWS.names if name != "messages"]
FAULTS: Final = pa.schema(
    [
        ("file", pa.int64()),
        ("position", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("head", pa.binary()),
    ]
)


def chat(row: Row) -> str:
    """What a conversation says beside its messages' roles and contents, as JSON text.

    `tools` is the list that it may call, and `messages` has an object for each message, see `curation.turns`.
    """
    tools = "" if row.tools is None else f',"tools":{row.tools}'
    return f'{{"messages":[{",".join([text or "{}" for text in row.beside])}]{tools}}}'


@dataclass
class Batch:
    """Rows on their way to a row group. :param values: of each row, in the order of `_VALUES`."""

    values: list[tuple[Any, ...]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    valid: list[bool] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    faults: list[tuple[int, int, str, str, bytes]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    beside: list[tuple[str, ...]] = field(default_factory=list)
    answers: list[tuple[bytes, bytes | None, bytes | None, bytes | None, bytes | None, bytes, int]] = field(
        default_factory=list
    )
    weight: int = 0

    def add(
        self,
        task: Task,
        position: int,
        row: Row,
        key: bytes,
        name: bytes,
        whole: bytes,
        words: int,
        priority: int,
        kind: int,
        question: bytes | None,
        answers: Sequence[Answer] = (),
        answer: bytes | None = None,
        layout: int = 0,
    ) -> None:
        chars = row.chars
        opening, closing = numbers(row.text if row.text is not None else asked(row.roles, row.contents))
        self.values.append(
            (
                key,
                name,
                whole,
                question,
                task.file,
                position,
                chars,
                words,
                chat(row) if row.beside else None,
                row.text,
                row.label,
                row.source if row.source is not None else task.name,
                row.group,
                row.extras,
                row.neutralised,
                row.invisible,
                opening,
                closing,
                answer,
                layout,
            )
        )
        self.valid.append(row.text is None)
        self.roles += row.roles
        self.contents += row.contents
        self.offsets.append(len(self.roles))
        self.beside.append(row.beside)
        self.priorities.append(priority)
        self.kinds.append(kind)
        if answers:
            named = [name for name, *_ in answers]
            around = zip(answers, [None, *named], [*named[1:], None], strict=False)
            self.answers += [
                (name, one, other, past, text, whole, int(learned))
                for (name, learned, past, text), one, other in around
            ]
        # UTF-8 needs up to four bytes a character; Arrow's 32-bit offsets must never overflow.
        for text in (row.extras, row.label, row.source, row.group):
            if text is not None:
                chars += len(text)
        self.weight += 4 * chars + 200 + 150 * len(row.roles)
        if (near := task.rules.near) is not None:
            self.weight += near.bands * (24 + 4 * near.rows)

    def _columns(self) -> dict[str, Sequence[Any]]:
        return dict(zip(_VALUES, zip(*self.values, strict=True), strict=True))

    def faulty(self) -> pa.RecordBatch:
        file, position, reason, detail, head = zip(*self.faults, strict=True)
        arrays = [integers(file), integers(position), strings(reason), strings(detail), binaries(head)]
        return pa.RecordBatch.from_arrays(arrays, schema=FAULTS)

    def answered(self) -> pa.RecordBatch:
        """What rows that share answers are found by."""
        *names, learned = zip(*self.answers, strict=True)
        return pa.RecordBatch.from_arrays([*map(binaries, names), integers(learned)], schema=ANSWERS)

    def compared(self) -> pa.RecordBatch:
        """What near duplicates are found by. Many rows share system message and tools, which makes none a duplicate."""
        columns = self._columns()
        texts = []
        for text, beside, first, last in zip(
            columns["text"], self.beside, self.offsets, self.offsets[1:], strict=False
        ):
            turns = zip(self.roles[first:last], self.contents[first:last], strict=True)
            said = [content for role, content in turns if role != "system"]
            texts.append("\n".join([*said, *filter(None, beside)]) if text is None else text)
        numbers = (columns["file"], columns["position"], self.priorities, self.kinds)
        return pa.RecordBatch.from_arrays([*map(integers, numbers), strings(texts)], schema=TEXTS)

    def rows(self) -> pa.RecordBatch:
        columns = self._columns()
        flat = pa.StructArray.from_arrays([strings(self.roles), strings(self.contents)], names=["role", "content"])
        mask = booleans([not valid for valid in self.valid])
        messages = pa.ListArray.from_arrays(offsets(self.offsets), flat, type=MESSAGES, mask=mask)
        arrays = [
            messages if name == "messages" else _MAKE[kind](columns[name])
            for name, kind in zip(ROWS.names, ROWS.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ROWS)


_MAKE: Final[dict[Any, Callable[[Any], pa.Array]]] = {
    pa.int64(): integers,
    pa.binary(): binaries,
    pa.string(): strings,
}
