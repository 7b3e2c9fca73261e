"""`python -m curation PATH --out FOLDER --recipe NAME`: curate local files, without S3 or Airflow."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from curation import check, curate
from curation.earlier import mark
from curation.increments import aside
from curation.local import Layered, check_out, folder_of, local_drop
from curation.shown import shown
from dropforge.errors import DropforgeError
from dropforge.recipes import load_recipe
from dropforge.sources import check_uploaded
from dropforge.standard_streams import escape_unencodable
from dropforge.store import FolderStore
from dropforge.terminal import Console

_console = Console(stderr=True)


def main(
    data: Annotated[Path, typer.Argument(help="A data file, or a folder of them.", metavar="PATH")],
    out: Annotated[Path, typer.Option(help="Folder for the dataset version.")],
    recipe: Annotated[str, typer.Option(help="A preset or a recipe file.")] = "sample",
    family: Annotated[str, typer.Option(help="Name of the model family.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Processes; 0 takes what the machine has.")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, spark or auto, instead of the recipe's.")] = None,
) -> None:
    """Make a dataset version of local files and check it."""
    escape_unencodable()
    try:
        say = partial(_console.print, style="dim", markup=False, highlight=False)
        given = {"workers": workers, "engine": engine}
        overrides = {"curation": {name: value for name, value in given.items() if value is not None}}
        settings = load_recipe(recipe, overrides)
        check_uploaded(settings, f"path {data}")
        check_out(data, out)
        drop = local_drop(data, family, on_skip=lambda path, why: say(f"{path} is left out: {why}"))
        store = Layered(out, [(drop.prefix, FolderStore(folder_of(data)))])
        with tempfile.TemporaryDirectory(prefix="curation-") as work, shown(_console) as progress:
            manifest = curate(store, drop, settings, workdir=Path(work), progress=progress, say=say)
        table = Table("end", "rows")
        for end, rows in manifest.counts.items():
            table.add_row(end, f"{rows:,}")
        _console.print(table)
        typer.echo(f"digest {manifest.digest}")
        typer.echo(f"card   {out.absolute() / manifest.files['card_html']}")
        check(manifest, settings, aside=aside(store, manifest))
        mark(store, manifest)
    except DropforgeError as error:
        thing, cause, mend = map(escape, (error.thing, error.cause, error.mend))
        _console.print(f"[red]{thing}[/red]: {cause}. [bold]{mend}[/bold]", soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
