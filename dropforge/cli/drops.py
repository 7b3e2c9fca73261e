"""`dropforge drop`: upload data, which starts a run, and wait for the run that takes it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from botocore.exceptions import BotoCoreError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dropforge import family_recipe, layout, ledger
from dropforge.cli.airflow import FINETUNE
from dropforge.cli.connect import Connection, StateOption, connect
from dropforge.cli.patience import Patience
from dropforge.cli.result import follow_to_end
from dropforge.cli.upload import default_name, find_files, upload
from dropforge.drop import Drop, read_drop
from dropforge.errors import DropforgeError, RecipeError
from dropforge.families import rules_of
from dropforge.layout import check_family
from dropforge.recipes.described import trained
from dropforge.recipes.load import build_recipe, default_preset, read_drop_recipe
from dropforge.recipes.rules import check_startable
from dropforge.settings import families_folder
from dropforge.stack.services import source_root
from dropforge.terminal import Console, Text

console = Console()


def drop_command(
    paths: Annotated[list[Path], typer.Argument(help="Files or a folder with rows.", metavar="PATH...", exists=True)],
    family: Annotated[str, typer.Option("--family", "-f", help="Name that a line of models shares.")],
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
    _check_recipe(connection, family, own or {})
    found = send(connection, family, name or default_name(), files)
    console.print(f"{found.family}/{found.drop} is complete: {len(found.data_files)} file(s), id {found.id}")
    known = _known(connection, found)
    if known is not None and not again:
        owner = ledger.newest_owner(connection.store, known.family, known.id)
        told = f"as {known.family}/{known.drop}, " + (f"taken by {owner}" if owner else "not taken by a run yet")
        console.print(
            Text(f"The same data was dropped before; {told}. Nothing is trained twice: use --again to insist.")
        )
    run = start_again(connection, known) if known is not None and again else None
    if watch:
        dag_run = run or wait_for_run(connection, found)
        raise typer.Exit(follow_to_end(connection, dag_run, f"{found.family}/{found.drop}", console))
    console.print(Text(f"Follow its run with `dropforge follow {found.family}/{found.drop}`"))


def _check_recipe(connection: Connection, family: str, own: Mapping[str, Any]) -> None:
    """Tell what will be trained, and refuse what the run of the embedded stack would refuse; elsewhere only tell, since
    files of families and presets lie where Airflow runs. :raises RecipeError: naming the key."""
    embedded = connection.stack is not None
    try:
        file = rules_of(families_folder(source_root() / "dags"), family) if embedded else None
        ruling = family_recipe.rule(connection.store, family, default_preset(), file)
        may = connection.settings.self_service or not embedded
        sets_it = family_recipe.sets_recipe(connection.store, family, ruling, self_service=may)
        recipe = check_startable(build_recipe(family_recipe.put_drop(ruling, own, sets_it=sets_it)))
        preset = f"preset {default_preset()}"
        whose = "the family's recipe" if ruling.own else "its recipe from now on" if sets_it else preset
        console.print(Text(f"{family} trains {trained(recipe)} ({whose})"), soft_wrap=True)
    except RecipeError as error:
        if embedded:
            raise
        told = f"The run may refuse it, as far as can be told from here: {error}"
        Console(stderr=True).print(Text(told, "yellow"), soft_wrap=True)


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


def wait_for_run(connection: Connection, drop: Drop, seconds: float = 120) -> str:
    """Wait until a run has claimed the drop; returns the Airflow id of the newest that has.

    :raises DropforgeError: if nobody takes it in time, the stack is stopped meanwhile, or S3 does not answer.
    """
    patience = Patience(connection.stack, f"dropforge follow {drop.family}/{drop.drop}")
    end = time.monotonic() + seconds
    held, entry = None, None
    while time.monotonic() < end:
        try:
            entry = entry or ledger.find(connection.store, drop)  # one of its checksums alone may hold other bytes
            owner = ledger.newest_owner(connection.store, entry.family, entry.id) if entry else None
            if owner is None and entry is not None:
                _check_not_superseded(connection, entry)
                held = ledger.held(connection.store, entry.family, entry.id)
        except BotoCoreError as error:
            patience.check_stack()
            mend = "Start the stack with `dropforge up`"
            patience.bear(DropforgeError(f"bucket {drop.bucket}", f"S3 does not answer ({error})", mend))
            owner = None
        if owner is not None:
            return owner
        patience.check_stack()
        time.sleep(0.5)
    raise DropforgeError(
        f"drop {drop.family}/{drop.drop}",
        f"no run took it within {seconds:g} s" + (f": {held}" if held else ""),
        "Follow it later: it is not forgotten"
        if held
        else f"Look at the runs of dropforge_intake and {FINETUNE} in Airflow at {connection.airflow.url}",
    )


def _check_not_superseded(connection: Connection, drop: Drop) -> None:
    because = ledger.superseded_because(connection.store, drop.family, drop.id)
    if because is not None:
        raise DropforgeError(
            f"drop {drop.family}/{drop.drop}",
            f"it gets no run: {because}",
            f"`dropforge letters {drop.family}/{drop.drop} --superseded --replay` puts it in line again",
        )


def start_again(connection: Connection, drop: Drop) -> str:
    """Start a forced re-run, as the form in Airflow does; returns the Airflow run id."""
    conf = {"family": drop.family, "drop": drop.id, "again": True}
    return connection.airflow.trigger(FINETUNE, conf)


def _known(connection: Connection, drop: Drop) -> Drop | None:
    """The entry of the same bytes from before this upload; None if they are new."""
    before = ledger.find(connection.store, drop)
    if before is None or before.drop == drop.drop:
        return None  # or intake has been quicker than this command
    return before
