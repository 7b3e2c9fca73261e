"""How a CSV file is written, by its first lines: what separates cells, and which columns have a name."""

from __future__ import annotations

import csv
import re
from typing import Final

_SEPARATORS: Final = ",\t;|"
#: Excel's own first line, which says what separates the cells below.
_SAID: Final = re.compile(rb'"?sep=(.)"?[,;\t|]*\r?', re.IGNORECASE)
_QUOTED: Final = re.compile(rb'"(?:[^"]|"")*"?')


def said_separator(line: bytes) -> str | None:
    """The separator that a first line `sep=;` names; None for any other line."""
    found = _SAID.fullmatch(line)
    return found[1].decode("ascii", "replace") if found else None


def separator(header: bytes) -> str:
    """The most frequent of `,;|` and tab in the line with the names of the columns, outside quotes."""
    bare = _QUOTED.sub(b"", header)
    return max(_SEPARATORS, key=lambda mark: bare.count(mark.encode()))


def told(head: bytes) -> list[str]:
    """What a person should know of the columns of a file that begins so, without a byte order mark."""
    lines = (line for line in head.split(b"\n") if line.strip())
    first = next(lines, b"")
    said = said_separator(first)
    header = first if said is None else next(lines, b"")
    names = next(csv.reader([header.decode("utf-8", "replace")], delimiter=said or separator(header)), [])
    bare = sum(not name.strip() for name in names)
    if bare < 2:
        return []  # a single one may be pandas' index
    return [f"{bare} columns have no name; they are passed over, and a row with a value in one of them cannot be used"]
