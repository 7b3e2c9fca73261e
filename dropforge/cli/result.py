"""The end of a run that was followed: why it failed, or which version it registered and whether that was promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.panel import Panel
from rich.table import Table

from dropforge import tracking
from dropforge.cli.connect import login_text
from dropforge.cli.watch import follow
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection
from dropforge.client.patience import asking_mlflow
from dropforge.client.progress import View, find_earlier, find_mlflow_run, why_failed
from dropforge.client.versions import Version, registered
from dropforge.errors import DropforgeError
from dropforge.mlflow_pages import run_page, version_page
from dropforge.stack.state import running_state
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mlflow.entities import Run

#: Exit code where a model was trained and registered, and the alias stayed where it was.
NOT_PROMOTED: Final = 3


def follow_to_end(connection: Connection, dag_run: str, title: str, console: Console) -> int:
    """Show a run until it ends, and what became of it; return the exit code.

    0 for a promoted model and for a run that trained none, 1 for a failure, `NOT_PROMOTED`.
    """
    view = follow(connection, dag_run, title, console)
    version = show_result(connection, dag_run, view, console)
    if view.state != "success":
        return 1
    return 0 if version is None or version.promoted else NOT_PROMOTED


def show_result(connection: Connection, dag_run: str, view: View, console: Console) -> Version | None:
    """Print what became of a run that has ended; return the version that it registered, if it did.

    Of a run that found nothing new to do, the earlier run and its version are named.
    """
    failed = why_failed(connection.airflow, dag_run, view.stages)
    if failed is not None:
        console.print(Text.assemble((f"{failed[0]} failed: ", "red"), failed[1]), soft_wrap=True)
    run, version, earlier = None, None, None
    try:
        if earlier := find_earlier(connection.airflow, dag_run, view.stages):
            console.print(Text(f"{earlier}, which stays as it is. Use --again to train once more."), soft_wrap=True)
        with asking_mlflow(connection.settings.tracking_uri):
            mlflow = tracking.client(connection.settings.tracking_uri)
            run_id = earlier.mlflow_run if earlier else find_mlflow_run(connection, dag_run)
            run = mlflow.get_run(run_id) if run_id else None
            version = registered(mlflow, run) if run else None
    except DropforgeError as error:
        told = f"What it registered is not known: {error.thing}, {error.cause}"
        console.print(Text(told, "yellow"), soft_wrap=True)
    if run is not None and earlier is None:
        _show_panel(view, run, version, console)
    _show_links(connection, dag_run, run, version, console)
    return None if earlier else version


def _show_panel(view: View, run: Run, version: Version | None, console: Console) -> None:
    tags = run.data.tags
    attempts = tags.get(tracking.TAG_ATTEMPT, "")
    rows = [
        ("model", f"{version.family} version {version.number}" if version else "none was registered"),
        ("alias", version.alias if version else ""),
        ("eval loss", f"{view.evals[0]:.3f} before, {view.evals[-1]:.3f} after" if view.evals else ""),
        ("attempts", f"{attempts}, {view.note}" if attempts and view.note else attempts),
        ("verdict", tags.get(tracking.TAG_VERDICT, "")),
        ("use it", f'mlflow.pyfunc.load_model("{version.address}")' if version else ""),
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value:  # as plain text: names from outside may look like markup
            table.add_row(Text(name, "bold"), Text(value))
    # A run may be repeated in the same MLflow run, whose version is then of the first time.
    did = view.state == "success" and any(one.name == "register" and one.state == "success" for one in view.stages)
    console.print(Panel(table, title="registered" if version and did else view.state, expand=False))


def _show_links(
    connection: Connection, dag_run: str, run: Run | None, version: Version | None, console: Console
) -> None:
    """Print each address on one line, however narrow the terminal is: a cut one can be neither clicked nor copied."""
    uri = connection.settings.tracking_uri
    stack = running_state(connection.stack) if connection.stack is not None else None
    airflow = login_text("airflow", stack, console) if stack else ""
    mlflow = login_text("mlflow", stack, console) if stack else ""
    lines = [("Airflow", connection.airflow.page(FINETUNE, dag_run), airflow)]
    if run is not None:
        lines.append(("MLflow", run_page(uri, run.info.experiment_id, run.info.run_id), mlflow))
    if version is not None:
        lines.append(("version", version_page(uri, version.family, version.number), ""))
    if stack is not None:
        lines.append(("logs", str(stack.folder / "logs"), ""))
    for name, place, login in lines:
        console.print(Text(f"{name:<8} {place}"), *filter(None, [login]), soft_wrap=True, highlight=False)
