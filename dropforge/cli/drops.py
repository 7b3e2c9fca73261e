"""`dropforge drop`: upload data, which starts a run, and wait for the run that takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dropforge import layout, ledger
from dropforge.cli.connect import StateOption
from dropforge.cli.result import follow_to_end
from dropforge.client.connection import Connection, connect
from dropforge.client.drops import dropped_before, foresee, never_trained, start_again, wait_for_run
from dropforge.client.upload import default_name, find_files, upload
from dropforge.drop import Drop, near_family, read_drop
from dropforge.layout import check_family
from dropforge.recipes.load import read_drop_recipe
from dropforge.terminal import Console, Text
from dropforge.text import counted

console = Console()


def drop_command(
    paths: Annotated[list[Path], typer.Argument(help="Files or a folder with rows.", metavar="PATH...", exists=True)],
    family: Annotated[str, typer.Option("--family", "-f", help="Name of the model family.")],
    name: Annotated[str | None, typer.Option(help="Name of the drop.", show_default="the time")] = None,
    recipe: Annotated[Path | None, typer.Option(help="recipe.yaml of the drop.", exists=True)] = None,
    watch: Annotated[bool, typer.Option("--follow", help="Follow the run that takes it, or took it.")] = False,
    again: Annotated[bool, typer.Option(help="Train again on data that was dropped before.")] = False,
    state: StateOption = None,
) -> None:
    """Upload data as a drop; the upload itself starts the run.

    With --follow the exit codes are those of `dropforge follow`.
    """
    check_family(family)
    files, own = find_files(paths, _tell_skipped), None
    if recipe is not None:
        files[layout.RECIPE] = recipe
    if layout.RECIPE in files:
        own = read_drop_recipe(files[layout.RECIPE])  # a broken recipe is refused here, not half an hour later
    connection = connect(state)
    trains, refuses = foresee(connection, family, own or {})
    if trains:
        console.print(Text(trains), soft_wrap=True)
    if refuses:
        Console(stderr=True).print(Text(refuses, "yellow"), soft_wrap=True)
    if near := near_family(connection.store, family):
        Console(stderr=True).print(Text(f"Family {family} is new. Did you mean {near}?", "yellow"), soft_wrap=True)
    found = send(connection, family, name or default_name(), files)
    console.print(f"{found.family}/{found.drop} is complete: {counted(len(found.data_files), 'file')}, id {found.id}")
    known = dropped_before(connection, found)
    if known is not None and not again:
        owners = ledger.owners(connection.store, known.family, known.id)
        told = f"as {known.family}/{known.drop}, " + (f"taken by {owners[-1]}" if owners else "not taken by a run yet")
        failed = never_trained(connection.airflow, owners)
        after = "Nothing is trained twice: use --again to insist."
        if failed:
            after = (
                f"That run failed before anything was trained, in {failed[0]}: {failed[1].rstrip('.')}.\n"
                f"Is that fixed? `dropforge resume {known.family}/{known.drop}`, or use --again for a new run."
            )
        console.print(Text(f"The same data was dropped before; {told}. {after}"), soft_wrap=True)
    run = start_again(connection, known) if known is not None and again else None
    if watch:
        dag_run = run or wait_for_run(connection, found)
        raise typer.Exit(follow_to_end(connection, dag_run, f"{found.family}/{found.drop}", console))
    console.print(Text(f"Follow its run with `dropforge follow {found.family}/{found.drop}`"))


def _tell_skipped(path: Path, why: str) -> None:
    console.print(Text(f"{path} is left out: {why}", "yellow"), soft_wrap=True)


def send(connection: Connection, family: str, name: str, files: dict[str, Path]) -> Drop:
    """Upload with a progress bar and read the drop back as intake will see it."""
    bar = Progress(
        TextColumn("upload"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
    )
    with bar:
        task = bar.add_task("upload", total=sum(path.stat().st_size for path in files.values()))
        upload(connection.store, family, name, files, lambda sent: bar.advance(task, sent))
    return read_drop(connection.store, family, name, connection.settings.bucket)
