"""Lists that commands print: a table for people, JSON and tab-separated text for programs, nothing cut in a pipe."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.measure import Measurement
from rich.table import Column, Table

from dropforge.terminal import Console, Text
from dropforge.text import escape

Cell = str | int | float | None


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
    """Print rows for people. Long cells take several lines on a terminal, and one line elsewhere."""
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))  # as plain text: names from outside may look like markup
    if console.is_terminal:
        console.print(table)
    else:
        whole = Measurement.get(console, console.options.update(width=1 << 16), table).maximum
        Console(file=console.file, width=whole).print(table)
