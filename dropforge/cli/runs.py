"""`dropforge runs`: the newest runs as a list."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.listing import Output, OutputOption, print_table, print_values
from dropforge.client.connection import connect
from dropforge.client.runs import ListedRun, list_runs
from dropforge.terminal import Console, Text

console = Console()
_COLUMNS = "run", "status", "started", "took", "drop", "base", "version", "eval loss", "tries", "verdict"


def runs(
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20,
    trials: Annotated[bool, typer.Option("--trials", help="The trials of sweeps, too.")] = False,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
) -> None:
    """List runs, the newest first. A sweep is one line, and its best trial another one once it is a candidate."""
    connection = connect(state)
    newest, missing = list_runs(connection, family, limit, trials=trials)
    if output is not Output.TABLE:
        print_values([row.values() for row in newest], tuple(ListedRun(0.0, "", "").values()), output)
    elif newest:
        print_table(_COLUMNS, [_cells(row) for row in newest], console)
    else:
        of = f" of family {family}" if family else ""
        console.print(Text(f"There are no runs{of} yet. Start one with `dropforge drop PATH --family NAME`."))
    if missing:
        told = Console(stderr=True, soft_wrap=True) if output is not Output.TABLE else console
        told.print(Text(f"Runs that failed before training are not listed: {missing}.", "yellow"))


def _cells(run: ListedRun) -> tuple[str, ...]:
    """Return what people see, in the order of `_COLUMNS`."""
    loss = " → ".join(f"{value:.3f}" for value in dict.fromkeys(run.loss))
    started = f"{datetime.fromtimestamp(run.began).astimezone():%m-%d %H:%M}"
    found = (
        started,
        _took(run.seconds),
        run.drop,
        run.base,
        run.version,
        loss,
        run.tries,
        _short(run.verdict),
    )
    return run.run, run.status, *(cell or "-" for cell in found)


def _took(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _short(verdict: str) -> str:
    """Why a model was held back; that it beat everybody needs no words."""
    return "promote" if verdict.startswith("promote:") else verdict
