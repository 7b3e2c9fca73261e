"""What a reader hands out: an input row, or a stretch of a file that is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from curation.formats import Format

#: First bytes of a bad row that are kept for people to look at.
HEAD: Final = 256

Fields = Mapping[str, Any]


class Line(NamedTuple):
    """A line without its last line feed; `position` is the offset of its first byte (decompressed).

    Blank lines that follow each other may come as one, with the line feeds between them inside.

    :param ended: whether a line feed stands behind it, and not the end of the file.
    """

    position: int
    data: bytes
    ended: bool = True


class Found(NamedTuple):
    """An input row: its fields, and its first bytes where the file is text."""

    position: int
    fields: Fields
    head: bytes


class Fault(NamedTuple):
    """A stretch of a file that is no row, or a row that ended: its offset, why, and its first bytes.

    :param reason: a code of the ledger.
    """

    position: int
    reason: str
    detail: str
    head: bytes


class Blank(NamedTuple):
    """Blank lines: no rows, but counted."""

    lines: int = 1


Record = Found | Fault | Blank


class Split(NamedTuple):
    """A part of one file: bytes [start, end) of a plain JSONL file, row groups of a Parquet file, else all of it.

    :param rows: the first rows of the part, if it is not to be read to its end.
    """

    path: Path
    format: Format
    start: int = 0
    end: int | None = None
    rows: int | None = None
