"""`dropforge demo`: the whole way once, from a drop to the registered model, and from then on only watching."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from dropforge import layout, settings, tracking
from dropforge.cli.connect import Connection, StateOption, connect, running_stack
from dropforge.cli.drops import send, show_end, start_again, wait_for_run
from dropforge.cli.patience import asking_mlflow
from dropforge.cli.services import login_text, start, stop
from dropforge.cli.watch import View, find_mlflow_run, follow
from dropforge.drop import Drop, read_drop
from dropforge.samples import write_sample
from dropforge.stack.state import check_folder
from dropforge.terminal import Console, Text

FAMILY = "python-help"
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
            console.print("The services stay up. Ctrl-C stops them." if started else "The services stay up.")
            if started:
                threading.Event().wait()
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
    show_end(connection, dag_run, view)
    with asking_mlflow(connection.settings.tracking_uri):
        return _summary(connection, dag_run, view)


def _drop_sample(connection: Connection, folder: Path, part: int) -> Drop:
    name = f"sample-{part}"
    if connection.store.stat(layout.success_key(FAMILY, name)) is not None:
        drop = read_drop(connection.store, FAMILY, name, connection.settings.bucket)
        console.print(f"{FAMILY}/{name} was dropped before; the same drop is not trained on twice (--again insists).")
        return drop
    files = {path.name: path for path in write_sample(folder / "samples" / name, part=part)}
    drop = send(connection, FAMILY, name, files)
    uri = f"{connection.settings.root}/{drop.prefix}"
    console.print(f"Dropped {len(files)} files into {uri}; {layout.SUCCESS} is there. Now watching.")
    return drop


def _summary(connection: Connection, dag_run: str, view: View) -> bool:
    mlflow = tracking.client(connection.settings.tracking_uri)
    run_id = find_mlflow_run(connection, dag_run)
    run = mlflow.get_run(run_id) if run_id else None
    tags = run.data.tags if run else {}
    version = tags.get(tracking.TAG_VERSION)
    champion = tracking.champion(connection.settings.tracking_uri, FAMILY) if version else None
    stack = running_stack(connection.stack, "Start it again with `dropforge up`")
    holds = champion is not None and champion.version == version
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, str | Text]] = [
        ("model", f"{FAMILY} version {version}" if version else "none was registered"),
        ("alias", "champion" if holds else f"champion stays at version {champion.version}" if champion else "-"),
        ("eval loss", f"{view.evals[0]:.3f} before, {view.evals[-1]:.3f} after" if view.evals else "-"),
        ("attempts", Text(tags.get(tracking.TAG_ATTEMPT, "-") + (f", {view.note}" if view.note else ""))),
        ("verdict", Text(tags.get(tracking.TAG_VERDICT, "-"))),
        ("Airflow", f"{stack.settings.airflow_url}   {login_text(*stack.login, stack.folder, console)}"),
        ("MLflow", f"{stack.settings.tracking_uri}   {login_text(*stack.mlflow_login, stack.folder, console)}"),
        ("", f"/#/experiments/{run.info.experiment_id}/runs/{run_id}" if run else ""),
        ("", f"/#/models/{FAMILY}/versions/{version}" if version else ""),
        ("logs", str(connection.settings.state / "logs")),
    ]
    for name, value in rows:
        table.add_row(f"[bold]{name}", value)
    registered = view.state == "success" and version is not None
    console.print(Panel(table, title="registered" if registered else view.state, expand=False))
    return registered
