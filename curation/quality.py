"""The stage of quality: rows that Gopher's and C4's rules do not want end here, and lines that C4's do not want go.

A row is judged by its text, or by the answers in it, or by all it says, put together. Gopher's rules see it as it
comes, C4's what is left of its lines. The first rule that a row breaks is its end.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from curation.c4 import C4, clean_lines, row_reason
from curation.columns import strings
from curation.gopher import Gopher, Repetition, judged, measure, quality_rules, repetition_rules
from curation.stage import Stage, Staged, refusals

#: Raised when the same settings give another outcome: part of the rules, so of the digest.
VERSION: Final = 1


@dataclass(frozen=True)
class Quality:
    """Which rules there are. Integers and text only: it is part of the digest.

    :param of: `answers` for the assistant's messages, `all` for every message; texts without a role always count.
    :param unicode: the version of the tables that say what a letter is, which come with Python.
    """

    gopher: Gopher | None = None
    gopher_repetition: Repetition | None = None
    c4: C4 | None = None
    of: str = "answers"
    version: int = VERSION
    unicode: str = unicodedata.unidata_version


def make_quality(quality: Quality) -> Stage:
    """The stage that follows these rules."""
    rules = [
        *(quality_rules(quality.gopher) if quality.gopher else ()),
        *(repetition_rules(quality.gopher_repetition) if quality.gopher_repetition else ()),
    ]
    stop_words = quality.gopher.stop_words if quality.gopher else ()
    repeats = quality.gopher_repetition is not None

    def stage(passages: pa.RecordBatch) -> Staged:
        contents: list[str] = passages.column("content").to_pylist()
        rows = wanted(passages, quality.of)
        ended: dict[int, tuple[str, str]] = {}
        if rules and rows:
            measures = measure(joined(contents, rows), stop_words, repeats)
            for row, index, number in zip(rows, range(len(rows)), judged(measures, rules).tolist(), strict=True):
                if number >= 0:
                    ended[row] = rules[number].reason, rules[number].said(measures, index)
        counts: Counter[str] = Counter()
        if quality.c4:
            _clean(contents, rows, quality.c4, ended, counts)
            if counts:
                passages = passages.set_column(2, "content", strings(contents))
        numbers = sorted(ended)
        refused = refusals(numbers, [ended[row][0] for row in numbers], [ended[row][1] for row in numbers])
        return Staged(passages, refused, counts)

    return stage


def wanted(passages: pa.RecordBatch, of: str) -> dict[int, list[int]]:
    """Which passages each row is judged by; a row without any is not judged."""
    rows: dict[int, list[int]] = {}
    everyone = zip(passages.column("row").to_pylist(), passages.column("role").to_pylist(), strict=True)
    for at, (row, role) in enumerate(everyone):
        if role is None or of == "all" or role == "assistant":
            rows.setdefault(row, []).append(at)
    return rows


def joined(contents: Sequence[str], rows: dict[int, list[int]]) -> list[str]:
    """What is judged of each row: its passages, a blank line between them."""
    return ["\n\n".join([contents[at] for at in places]) for places in rows.values()]


def _clean(
    contents: list[str], rows: dict[int, list[int]], rules: C4, ended: dict[int, tuple[str, str]], counts: Counter[str]
) -> None:
    """Take lines out of the contents of rows that are still there, and end those that C4's rules end."""
    for row, places in rows.items():
        if row in ended:
            continue
        texts = [contents[at] for at in places]
        cleaned = [clean_lines(text, rules) for text in texts]
        code, detail = row_reason(texts, cleaned, rules)
        if code:
            ended[row] = code, detail
            continue
        for at, item in zip(places, cleaned, strict=True):
            contents[at] = item.text
            if item.counts:
                counts.update({**item.counts, "c4_texts_changed": 1})


__all__ = ["Quality", "make_quality", "wanted"]
