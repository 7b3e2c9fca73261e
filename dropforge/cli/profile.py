"""`dropforge profile`: ask a run that is being trained for a profile of its next steps."""

from __future__ import annotations

from typing import Annotated

import typer

from dropforge import layout
from dropforge.cli.connect import StateOption
from dropforge.client.connection import connect
from dropforge.errors import DropforgeError
from dropforge.profiling import MOST, request
from dropforge.store import Store
from dropforge.terminal import Console
from dropforge.text import counted


def profile(
    run: Annotated[str, typer.Argument(help="A run, as `dropforge runs` names it.")],
    steps: Annotated[int, typer.Option("--steps", "-n", help="Steps to profile.", min=1, max=MOST)] = 3,
    state: StateOption = None,
) -> None:
    """Profile the next steps of a run that is being trained; the traces go to its folder."""
    connection = connect(state)
    ask(connection.store, run, steps)
    folder = f"{connection.settings.root}/{layout.run_prefix(run)}profiles/"
    Console(highlight=False).print(
        f"Asked for {counted(steps, 'step')} after the run's next log line; each rank writes its trace to {folder}",
        soft_wrap=True,
    )


def ask(store: Store, run: str, steps: int) -> None:
    """Write the request. :raises DropforgeError: if there is no such run, or nothing left of it to profile."""
    if "/" in run or store.stat(layout.run_key(run)) is None:
        raise DropforgeError(f"run {run}", "there is no such run", "List them with `dropforge runs`")
    if store.stat(layout.report_key(run)) is not None:
        raise DropforgeError(f"run {run}", "its training is done", "Give `train.profile` in the recipe of the next one")
    store.put(layout.profile_key(run), request(steps))
