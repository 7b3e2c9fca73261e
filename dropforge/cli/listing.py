"""Lists that commands print: a table for people, JSON and tab-separated text for programs, nothing is cut."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, Final

import typer

from dropforge.terminal import Console, Text
from dropforge.text import escape

Cell = str | int | float | None

_GAP: Final = 2  # columns of the terminal between two cells
_INDENT: Final = "  "


class Output(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"
    TSV = "tsv"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="A table, or values for programs.", metavar="table|json|tsv")
]


def print_values(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str], output: Output) -> None:
    """Print rows for programs: JSON with null, or a line of names and one for each row, empty where there is no value.

    A number without end, which JSON has not, is no value. :param columns: the names, for a list without rows.
    """
    known = [{name: None if _endless(cell) else cell for name, cell in row.items()} for row in rows]
    if output is Output.JSON:
        typer.echo(json.dumps(known, indent=1, allow_nan=False))
        return
    for line in [columns, *([row[name] for name in columns] for row in known)]:
        typer.echo("\t".join("" if cell is None else escape(" ".join(str(cell).split())) for cell in line))


def _endless(cell: Cell) -> bool:
    return isinstance(cell, float) and not math.isfinite(cell)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print rows for people. On a terminal, the columns that find no room stand below each row; else a row is a line.

    What stands in a column is whole, so that a run's name can be copied. A cell `-` has no value.
    """
    lines = [columns, *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(Text(line[column]).cell_len for line in lines) for column in range(len(columns))]
    shown = columns_that_fit(widths, console.width) if console.is_terminal else len(columns)
    for number, line in enumerate(lines):
        text = Text(style="" if number else "bold")
        for cell, width in zip(line[:shown], widths, strict=False):
            text.append(cell + " " * (width + _GAP - Text(cell).cell_len))
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)
        if number:
            below = zip(columns[shown:], line[shown:], strict=True)
            _print_below([f"{name} {cell}" for name, cell in below if cell not in {"", "-"}], console)


def columns_that_fit(widths: Sequence[int], room: int) -> int:
    """Return how many of the first columns a line of the terminal has room for; one at least."""
    ends = accumulate(width + _GAP for width in widths)
    return max(1, sum(end - _GAP <= room for end in ends))


def _print_below(parts: Sequence[str], console: Console) -> None:
    """Print what found no room, folded between its parts and in long ones between words: an address stays whole."""
    room = max(console.width, 20)
    told = (part.replace(" ", "\xa0") if len(part) + len(_INDENT) + 2 <= room else part for part in parts)
    wrapped = textwrap.wrap(
        " | ".join(told),
        room,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapped:
        console.print(Text(line.replace("\xa0", " "), "dim"), soft_wrap=True, highlight=False)
