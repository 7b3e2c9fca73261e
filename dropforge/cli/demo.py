"""`dropforge demo`: the whole way once, from a drop to the registered model, and from then on only watching."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropforge import layout, settings
from dropforge.cli.connect import StateOption
from dropforge.cli.drops import send
from dropforge.cli.result import show_result
from dropforge.cli.services import start, stay, stop
from dropforge.cli.watch import follow
from dropforge.client.connection import Connection, connect
from dropforge.client.drops import start_again, wait_for_run
from dropforge.drop import Drop, read_drop
from dropforge.samples import write_sample
from dropforge.stack.state import check_folder
from dropforge.terminal import Console

FAMILY = "python-help"
#: A model from nothing: it needs no hub.
RECIPE = "extends: sample\n"
console = Console()


def demo(
    exit_after: Annotated[bool, typer.Option("--exit", help="Stop the services at the end.")] = False,
    again: Annotated[bool, typer.Option(help="Train again on a drop that was trained on before.")] = False,
    part: Annotated[int, typer.Option(help="Which sample: 1 or 2, different rows of one family.", min=1, max=2)] = 1,
    state: StateOption = None,
) -> None:
    """Start everything, drop sample data into S3, follow the run to the registered model."""
    folder = check_folder(state or settings.default_state())
    started = start(folder)
    registered = False
    try:
        connection = connect(folder)
        registered = _run(connection, folder, again, part)
        if not exit_after:
            console.print("The services stay up.")
            if started:
                stay(folder, console)
                started = False
    except KeyboardInterrupt:
        console.print("Stopping.")
    finally:
        if started or exit_after:
            stop(folder)
    raise typer.Exit(0 if registered else 1)


def _run(connection: Connection, folder: Path, again: bool, part: int) -> bool:
    drop = _drop_sample(connection, folder, part)
    dag_run = start_again(connection, drop) if again else wait_for_run(connection, drop)
    view = follow(connection, dag_run, f"{drop.family}/{drop.drop}", console)
    return show_result(connection, dag_run, view, console) is not None and view.state == "success"


def _drop_sample(connection: Connection, folder: Path, part: int) -> Drop:
    name = f"sample-{part}"
    if connection.store.stat(layout.success_key(FAMILY, name)) is not None:
        drop = read_drop(connection.store, FAMILY, name, connection.settings.bucket)
        console.print(f"{FAMILY}/{name} was dropped before; the same drop is not trained on twice (--again insists).")
        return drop
    files = {path.name: path for path in write_sample(folder / "samples" / name, part=part)}
    files[layout.RECIPE] = folder / "samples" / f"{name}.yaml"
    files[layout.RECIPE].write_text(RECIPE)
    drop = send(connection, FAMILY, name, files)
    uri = f"{connection.settings.root}/{drop.prefix}"
    console.print(f"Dropped {len(files)} files into {uri}; {layout.SUCCESS} is there. Now watching.")
    return drop
