"""Text from outside made fit for people: nothing in it steers a terminal, and none of it is without end."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Iterable, Sequence
from typing import Final

_HARMLESS: Final = frozenset("\n\t\u200c\u200d")  # the joiners make letters of many scripts
#: What means something in a cell of a Markdown table, as a class of a regular expression.
_MARKUP: Final = r"\\|<\["
#: Characters to which cells of a table are filled up at most.
_WIDEST: Final = 48


def escape(text: str) -> str:
    """Return the text with control and other invisible characters spelled out, as `\\x1b`; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _HARMLESS or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def has_surrogates(text: str) -> bool:
    """Whether a text holds a half of a surrogate pair, which no UTF-8 can hold: JSON's escapes and Python's names of
    files that are none make some."""
    return any("\ud800" <= sign <= "\udfff" for sign in text)


def why_unstorable(text: str) -> str | None:
    """What a text holds that PostgreSQL's JSONB, and so an XCom or conf of Airflow, refuses; None if nothing."""
    if has_surrogates(text):
        return "half of a character"
    return "a NUL" if "\0" in text else None


def read_count(text: str) -> int | None:
    """The amount that outside text gives in ASCII digits; None for what is none, or has more than 64 bits."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        return None
    return found if (found := int(text)) < 1 << 63 else None


def counted(count: int, noun: str, many: str = "") -> str:
    """A number of things: `1 rank`, `2 ranks`. :param many: the noun's plural, where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def as_line(value: object, most: int = 200) -> str:
    """Return what a stranger wrote, or a pod, as a part of one line of at most `most` characters."""
    return shorten(" ".join(escape(shorten(str(value), most)).split()), most)


def as_cell(text: str) -> str:
    """Return a text as one cell of a Markdown table, where it stays a text; `from_cell` takes it back."""
    return re.sub(rf"([{_MARKUP}])", r"\\\1", " ".join(text.split()))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[str] = ()) -> str:
    """A table in Markdown whose columns stand under each other, so that a log shows it as well as a page.

    :param rows: cells as `as_cell` gives them. :param right: headings of the columns that hold numbers.
    """
    lines = [tuple(head), *map(tuple, rows)]
    widths = [min(max(3, *map(len, column)), _WIDEST) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        ]
        return f"| {' | '.join([*padded[:-1], cells[-1]])} |"

    rule = "|".join(
        "-" * (width + 1) + (":" if name in right else "-") for name, width in zip(head, widths, strict=True)
    )
    return "\n".join([line(lines[0]), f"|{rule}|", *map(line, lines[1:])])


def from_cell(cell: str) -> str:
    """Return the text that `as_cell` made a cell of."""
    return re.sub(rf"\\([{_MARKUP}])", r"\1", cell)


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters: the beginning, how much is left out, and the end.

    :param most: below 60, what says how much is left out comes on top.
    """
    if len(text) <= most:
        return text
    room = most - 40 if most >= 60 else most
    head, tail = room * 2 // 3, room // 3
    return f"{text[:head]} [... {len(text) - head - tail:,} characters ...] {text[-tail:] if tail else ''}"
