"""How a CSV file is written, by its first lines: what separates cells, whether these stand in quotes, and which columns
have a name."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

_SEPARATORS: Final = ",\t;|\x01"  # the last one is Hive's
#: Excel's own first line, which says what separates the cells below.
_SAID: Final = re.compile(rb'"?sep=(.)"?[,;\t|]*\r?', re.IGNORECASE)
_LONGEST: Final = 4096  # bytes of a line that names columns, where no name of a file says so
_RULE: Final = re.compile(r":?[-+=]+:?")
_QUOTED: Final = re.compile(rb'"(?:[^"]|"")*"?')


def said_separator(line: bytes) -> str | None:
    """The separator that a first line `sep=;` names; None for any other line."""
    found = _SAID.fullmatch(line)
    return found[1].decode("ascii", "replace") if found else None


def separator(header: bytes) -> str:
    """The most frequent of `,;|`, tab and Hive's Ctrl-A in the line with the names of the columns, outside quotes."""
    bare = _QUOTED.sub(b"", header)
    return max(_SEPARATORS, key=lambda mark: bare.count(mark.encode()))


def is_quoted(quotes: str, header: bytes, mark: str) -> bool:
    """Tell whether cells of a file may stand in quotes.

    :param quotes: `data.quotes` of the recipe. :param header: line with the names of the columns. :param mark: what
        separates them; most programs that write tabs know no quotes, and those that do write the names in some.
    """
    if quotes != "auto" or mark not in ("\t", "\x01"):
        return quotes != "never"
    names = [name for name in header.strip().split(mark.encode()) if name]
    return all(stands_in_quotes(name.decode("utf-8", "replace")) for name in names)


def is_spaced(header: bytes, mark: str) -> bool:
    """Tell whether a space stands behind all that separates the names of columns, as no program writes by default."""
    bare, sign = _QUOTED.sub(b"", header), mark.encode()
    return mark != "\t" and 0 < bare.count(sign) == bare.count(sign + b" ")


def is_rule(cells: Sequence[str]) -> bool:
    """Tell whether a line rules off the names of columns above it, as in Markdown and in SQL's terminals."""
    filled = [cell.strip() for cell in cells if cell.strip()]
    return bool(filled) and all(map(_RULE.fullmatch, filled))


def opens(cell: str) -> bool:
    """Tell whether a cell begins with a quotation mark that it does not close."""
    return cell[:1] == '"' and cell.count('"') % 2 == 1


def closes(cell: str) -> bool:
    """Tell whether a cell ends with a quotation mark that it does not open."""
    return cell[-1:] == '"' and cell.count('"') % 2 == 1


def is_bare(cell: str) -> bool:
    """Tell whether a cell has a quotation mark, as none has outside of quotes where a program quotes."""
    return '"' in cell and not stands_in_quotes(cell)


def has_escaped_quotes(cell: str) -> bool:
    """Tell whether a backslash stands before each quotation mark of a cell, and there are some: JSON has others."""
    marks = cell.count('"')
    return marks > 0 and marks == cell.count('\\"')


def is_table(body: bytes, names: Container[str]) -> bool:
    """Tell whether a text is a table: its first line names two columns or more that mean something, and the second one
    has what separates them.

    :param body: its first bytes. :param names: of columns, in small letters.
    """
    lines = (line for line in body.split(b"\n") if line.strip())
    first, second = next(lines, b""), next(lines, b"")
    said = said_separator(first)
    header, row = (first, second) if said is None else (second, next(lines, b""))
    mark = said or separator(header)
    if len(header) > _LONGEST or mark.encode() not in header or mark.encode() not in row:
        return False
    cells = _named(header, mark)
    return sum(cell.strip().lower() in names for cell in cells) > 1


def stands_in_quotes(cell: str) -> bool:
    """Tell whether a cell begins and ends with a quotation mark."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def stands_in_single_quotes(cell: str) -> bool:
    """Tell whether a cell begins and ends with an apostrophe, and any within are doubled, as where they quote."""
    return len(cell) > 2 and cell[0] == cell[-1] == "'" and "'" not in cell[1:-1].replace("''", "")


@dataclass
class Quotes:
    """How quotes of a file are read, and what was seen of how it is written.

    :param asked: `data.quotes` of the recipe. :param seen: rows or lines by a name of `SEEN`.
    """

    asked: str = "auto"
    seen: Counter[str] = field(default_factory=Counter)


#: What a person should know of so many rows or lines of a file.
SEEN: Final = {
    "spread": "records run over several lines, within quotes; `data.quotes: never` reads each line as a row",
    "quoted": "rows have cells in quotes, which were read as characters; `data.quotes: always` takes them off",
    "open": "lines are parts of cells that open a quote and run over lines: no rows; `data.quotes: always` reads them, "
    "and with `never` those are rows that have as many cells as one",
    "perhaps": "rows open a quote that a later line closes, both read as characters; if a cell runs over lines there, "
    "`data.quotes: always` reads it",
    "single": "rows have cells in single quotes, which were read as characters; if they quote, write double ones",
    "spaced": "rows have cells with a space before their quotes, which were read as characters; "
    "write none behind what separates cells",
    "escaped": 'rows have `\\n`, `\\t`, `\\r`, `\\\\`, `\\"`, or `\\` before a line end, which were read as letters; '
    "if they mean line ends, tabs, backslashes and quotation marks, as PostgreSQL, MySQL and Hive write them, export "
    "as CSV with quotes and without escapes",
    "names": "lines repeat the names of columns, or are the rule below them, and were left out",
    "further": "lines below the names of columns say more of these, as Qualtrics, SurveyMonkey, Orange and "
    "ClickHouse write them, and were left out",
    "unended": "row at the end has no line end behind it: if the file was cut off there, upload it again, whole",
    "alike": "line below the names of columns has the same text in each cell, and was read as a row; if it is a second "
    "line of names, as pandas writes them, take it out",
}


def told(head: bytes) -> list[str]:
    """What a person should know of the columns of a file that begins so, without a byte order mark."""
    lines = (line for line in head.split(b"\n") if line.strip())
    first = next(lines, b"")
    said = said_separator(first)
    header = first if said is None else next(lines, b"")
    mark = said or separator(header)
    names = _named(header, mark)
    bare = sum(not name.strip() for name in names)
    found = []
    if bare > 1:  # a single one may be pandas' index
        found.append(
            f"{bare} columns have no name; they are skipped, and a row with a value in one of them cannot be used"
        )
    whole = [line.rstrip(b"\r").decode("utf-8", "replace") for line in lines][:-1]  # the last one may be cut
    if _is_padded(_cells(whole[:_LOOKED_AT], mark)):
        found.append(
            "cells are filled up with spaces, as in Markdown's tables and columns of a fixed width, which are learned "
            "with them; write the texts alone"
        )
    return found


#: Rows that are looked at for it.
_LOOKED_AT: Final = 20


def _named(header: bytes, mark: str) -> list[str]:
    """The names in the line that has them."""
    return next(iter(_cells([header.decode("utf-8", "replace")], mark, spaced=True)), [])


def _cells(lines: Sequence[str], mark: str, *, spaced: bool = False) -> list[list[str]]:
    """The cells of lines; none if one has a carriage return within it. :param spaced: spaces may follow a mark."""
    try:
        return list(csv.reader(lines, delimiter=mark, skipinitialspace=spaced))
    except csv.Error:
        return []


def _is_padded(rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether most rows have a cell that ends with several spaces, or stands between two."""
    kept = [[cell for cell in row if cell.strip()] for row in rows if not is_rule(row)]
    padded = [row for row in kept if any(cell[-2:] == "  " or (cell[:1] == " " == cell[-1:]) for cell in row)]
    return len(kept) > 1 and 2 * len(padded) > len(kept)
