"""`dropforge dags`: the DAG files of the installed version, for an Airflow of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropforge.errors import DropforgeError
from dropforge.source_root import source_root
from dropforge.terminal import Console, Text
from dropforge.whole_file import write_whole

console = Console(soft_wrap=True)


def dags(
    to: Annotated[Path, typer.Option("--to", help="A folder below Airflow's DAGs.", file_okay=False)],
    update: Annotated[bool, typer.Option("--update", help="Replace files that differ, as after an upgrade.")] = False,
) -> None:
    """Write the DAG files into a folder of your own Airflow, where this package is installed too.

    Families are read from DROPFORGE_FAMILIES, otherwise from the folder `families` beside the folder of the DAG files.
    """
    wanted = {path.name: path.read_bytes() for path in sorted((source_root() / "dags").glob("*.py"))}
    there = {name: (to / name).read_bytes() for name in wanted if (to / name).exists()}
    differ = [name for name in there if there[name] != wanted[name]]
    if differ and not update:
        raise DropforgeError(
            f"folder {to}",
            f"it holds other files of these names: {', '.join(differ)}",
            "Give another folder, or `--update` to replace them",
        )
    to.mkdir(parents=True, exist_ok=True)
    for name, content in wanted.items():
        if there.get(name) != content:
            write_whole(to / name, content)
    console.print(Text(f"{len(wanted)} DAG files are in {to}"))
    if others := sorted(path.name for path in to.glob("*.py") if path.name not in wanted):
        told = f"Beside them are {', '.join(others)}: remove what an earlier version of Dropforge has left"
        console.print(Text(told, "yellow"))
