"""The live view of one run: stages, training progress, falling loss, tokens per second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from dropforge.client.connection import Connection
from dropforge.client.progress import View, looks
from dropforge.scales import mean, share
from dropforge.terminal import Console, Text

_MARKS = {
    "success": ("✓", "green"),
    "failed": ("✗", "red"),
    "upstream_failed": ("-", "dim"),
    "skipped": ("-", "dim"),
    "running": ("▶", "cyan"),
    "deferred": ("▶", "cyan"),
    "up_for_retry": ("↻", "yellow"),
    "awaiting_input": ("?", "yellow"),
}
_BARS = "▁▂▃▄▅▆▇█"


def follow(connection: Connection, dag_run: str, title: str, console: Console, seconds: float = 1.0) -> View:
    """Show the run until it ends; returns the last picture.

    :raises DropforgeError: as `looks`.
    """
    pictures = looks(connection, dag_run, title, seconds)
    first = view = next(pictures)
    shown: dict[str, str] = {}
    try:
        with Live(draw(first), console=console, refresh_per_second=4, transient=False) as live:
            for view in itertools.chain([first], pictures):
                live.update(draw(view))
                if not console.is_terminal:
                    _tell(view, shown, console)
    finally:
        if not console.is_terminal:
            console.line()  # the last picture ends without one
    return view


def draw(view: View) -> RenderableType:
    """The picture of one look."""
    table = Table.grid(padding=(0, 2))
    for stage in view.stages:
        mark, style = _MARKS.get(stage.state, ("·", "dim"))
        took = f"{stage.seconds:5.0f} s" if stage.seconds is not None else ""
        tries = f"try {stage.attempt}" if stage.attempt > 1 else ""
        table.add_row(Text(mark, style=style), Text(stage.name, style=style), took, tries)
    head = Text.assemble((view.title, "bold"), f"  {view.state}", (f"  {view.note}" if view.note else "", "yellow"))
    again = ((stage.name, stage.cause) for stage in view.stages if stage.cause)
    causes = [Text(f"{name} will be tried again: {cause}", "yellow") for name, cause in again]
    job = [Text(view.job, style="dim")] if view.job else []
    return Group(head, table, *causes, *job, *([_training(view)] if view.step is not None else []))


def _training(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    figures = [
        f"loss {view.losses[-1]:.3f}" if view.losses else "",
        f"{view.tokens_per_second:,.0f} tok/s" if view.tokens_per_second else "",
        f"eval {view.evals[0]:.3f} → {view.evals[-1]:.3f}" if view.evals else "",
    ]
    bar = [ProgressBar(total=view.steps, completed=view.step or 0, width=20)] if view.steps else []
    row.add_row(*bar, _step(view), *(figure for figure in figures if figure))
    return Group(row, Text(sparkline(view.losses, 60), style="magenta"))


def _step(view: View) -> str:
    """How far the training is; without the total where it is not known."""
    return f"step {view.step}/{view.steps}" if view.steps else f"step {view.step}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in `width` characters, each the mean of its share."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for place in range(width):
        part = finite[place * len(finite) // width : (place + 1) * len(finite) // width]
        means.append(mean(part))
    low, high = min(means), max(means)
    if low == high:
        return _BARS[0] * width
    return "".join(_BARS[round(share(value, low, high) * (len(_BARS) - 1))] for value in means)


def _tell(view: View, shown: dict[str, str], console: Console) -> None:
    """Without a terminal the picture cannot move, so changes are told line by line."""
    for stage in view.stages:
        word = f"{stage.state} try {stage.attempt}" if stage.attempt > 1 else stage.state
        if stage.state and shown.get(stage.name) != word:
            shown[stage.name] = word
            console.print(Text(f"{stage.name}: {word}" + (f": {stage.cause}" if stage.cause else "")))
    quarter = str((view.step or 0) * 4 // view.steps) if view.steps else ""
    if view.losses and shown.get("quarter") != quarter:
        shown["quarter"] = quarter
        console.print(f"train: {_step(view)}, loss {view.losses[-1]:.3f}", highlight=False)
