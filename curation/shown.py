"""The progress of a curation, for people: bars in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from curation.pace import Lines, Pace
from dropforge.terminal import Console

if TYPE_CHECKING:
    from curation.pipeline import Progress


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """What to give `curate` as its `progress`."""
    if not console.is_terminal:
        yield Lines(lambda line: console.print(line, markup=False, highlight=False))
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console) as bars:
        stages: dict[str, TaskID] = {}
        pace = Pace()

        def progress(stage: str, done: int, total: int, rows: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage)
            pace(stage, done, total, rows)
            bars.update(stages[stage], completed=done, total=max(1, total), description=pace.line())

        yield progress
