"""`python -m curation FOLDER --out FOLDER --recipe NAME`: curate local files, without S3 or Airflow."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from curation import check, curate
from dropforge import layout
from dropforge.drop import Drop, DropFile, identity
from dropforge.errors import DataError, DropforgeError
from dropforge.recipes import load_recipe
from dropforge.sources import check_uploaded
from dropforge.store import FolderStore

_console = Console(stderr=True)


class _Beside(FolderStore):
    """A store for datasets whose drop lies in a folder of its own."""

    def __init__(self, root: Path, folder: Path, prefix: str) -> None:
        super().__init__(root)
        self.source, self.prefix = FolderStore(folder), prefix

    def open(self, key: str, etag: str | None = None) -> BinaryIO:
        if key.startswith(self.prefix):
            return self.source.open(key.removeprefix(self.prefix), etag)
        return super().open(key, etag)


def local_drop(folder: Path, family: str, name: str) -> Drop:
    """A folder's files as a drop. :raises DataError: if there are none."""
    if not folder.is_dir():
        raise DataError(f"folder {folder}", "it is not there", "Give a folder with JSONL, CSV, Parquet or text files")
    found = [info for info in FolderStore(folder).list() if info.key != layout.SUCCESS]
    files = tuple(DropFile(key=i.key, size=i.size, content=f"etag:{i.etag}", etag=i.etag) for i in found)
    if not files:
        raise DataError(f"folder {folder}", "it is empty", "Put JSONL, CSV, Parquet or text files into it")
    layout.drop_prefix(family, name)
    return Drop(family=family, drop=name, id=identity(files), bucket="", files=files)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with the data files.")],
    out: Annotated[Path, typer.Option(help="Folder for the dataset version.")],
    recipe: Annotated[str, typer.Option(help="A preset or a recipe file.")] = "sample",
    family: Annotated[str, typer.Option(help="Name of the line of models.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Processes; 0 takes what the machine has.")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, spark or auto, instead of the recipe's.")] = None,
) -> None:
    """Make a dataset version of local files and check it."""
    try:
        given = {"workers": workers, "engine": engine}
        overrides = {"curation": {name: value for name, value in given.items() if value is not None}}
        settings = load_recipe(recipe, overrides)
        check_uploaded(settings, f"folder {folder}")
        drop = local_drop(folder, family, "local")
        store = _Beside(out, folder, drop.prefix)
        columns = (SpinnerColumn(), TextColumn("{task.description:8}"), BarColumn(), TaskProgressColumn())
        with (
            tempfile.TemporaryDirectory(prefix="curation-") as work,
            Progress(*columns, TimeElapsedColumn(), console=_console) as bar,
        ):
            stages = {}

            def progress(stage: str, done: int, total: int) -> None:
                if stage not in stages:
                    stages[stage] = bar.add_task(stage)
                bar.update(stages[stage], completed=done, total=max(1, total))

            say = partial(_console.print, style="dim", markup=False, highlight=False)
            manifest = curate(store, drop, settings, workdir=Path(work), progress=progress, say=say)
        table = Table("end", "rows")
        for end, rows in manifest.counts.items():
            table.add_row(end, f"{rows:,}")
        _console.print(table)
        typer.echo(f"digest {manifest.digest}")
        typer.echo(f"card   {out.absolute() / manifest.files['card_html']}")
        check(manifest, settings)
    except DropforgeError as error:
        thing, cause, mend = map(escape, (error.thing, error.cause, error.mend))
        _console.print(f"[red]{thing}[/red]: {cause}. [bold]{mend}[/bold]", soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
