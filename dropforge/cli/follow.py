"""`dropforge follow`: watch a run to its end."""

from __future__ import annotations

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.named import OptionalRunArgument
from dropforge.cli.result import follow_to_end
from dropforge.client.connection import connect
from dropforge.client.named import find_dag_run
from dropforge.terminal import Console

console = Console()


def follow_command(run: OptionalRunArgument = None, state: StateOption = None) -> None:
    """Follow a run to its end.

    Exit code 0 if its model was promoted or it had none to train, 1 if it failed, 3 if its model was not promoted.
    """
    connection = connect(state)
    dag_run, title = find_dag_run(connection, run)
    raise typer.Exit(follow_to_end(connection, dag_run, title, console))
