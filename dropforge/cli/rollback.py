"""`dropforge rollback`: a family's alias back to an earlier version, by Airflow and with the user's rights there."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from dropforge.cli.connect import StateOption
from dropforge.client.airflow import ROLLBACK, Airflow
from dropforge.client.connection import connect
from dropforge.client.patience import LIMIT, asking_mlflow
from dropforge.errors import DropforgeError
from dropforge.rollback import choose
from dropforge.terminal import Console, Text

console = Console(soft_wrap=True)


def rollback(
    family: Annotated[str, typer.Argument(help="Name of the model family.")],
    to: Annotated[
        str | None,
        typer.Option(help="Number of the version.", show_default="the one that held the alias before"),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Why; it is recorded on the previous champion.", show_default="you are asked")
    ] = None,
    alias: Annotated[str, typer.Option(help="The alias that moves.")] = "champion",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    state: StateOption = None,
) -> None:
    """Make an earlier version the champion again. Nothing is trained or deleted.

    The previous champion is not promoted again, unless it is named with --to.
    """
    if reason is not None and not reason.strip():
        raise typer.BadParameter("say why", param_hint="--reason")
    connection = connect(state)
    uri = connection.settings.tracking_uri
    with asking_mlflow(uri):
        choice = choose(uri, connection.store, family, alias, to)
    word = "back " if choice.back else ""
    way = f"from version {choice.current or 'none'} {word}to version {choice.version}"
    console.print(Text(f"{alias} of {family} {'moves' if yes and reason else 'would move'} {way}"))
    try:
        if reason is None:
            reason = _ask_reason()
        if not yes and not typer.confirm("Do it?"):
            raise typer.Exit(1)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        console.print()
        cause = "it did not move: a reason and a confirmation are asked for, and there is no terminal to answer on"
        raise DropforgeError(f"{alias} of {family}", cause, "Give `--reason` and `--yes`") from None
    conf = {"family": family, "version": choice.version, "reason": reason.strip(), "alias": alias}
    _follow(connection.airflow, connection.airflow.trigger(ROLLBACK, conf))
    console.print(Text(f"Version {choice.version} of {family} is {alias} now: {uri}/#/models/{family}"))


def _ask_reason() -> str:
    """Ask until there is one."""
    while not (reason := str(typer.prompt("Reason")).strip()):
        pass
    return reason


def _follow(airflow: Airflow, run: str) -> None:
    """Wait for the end of the run. :raises DropforgeError: if it fails, or does not begin."""
    end = time.monotonic() + 2 * LIMIT
    page = airflow.page(ROLLBACK, run)
    with console.status(f"Airflow does it: {page}"):
        while (found := airflow.dag_run(ROLLBACK, run)["state"]) not in {"success", "failed"}:
            if time.monotonic() > end:
                raise DropforgeError(
                    f"run {run} of {ROLLBACK}",
                    f"it is {found} for {2 * LIMIT:.0f} s now",
                    f"See whether the DAG is paused: {page}",
                )
            time.sleep(0.5)
    if found == "failed":
        tasks = [task for task in airflow.task_states(ROLLBACK, run) if task["state"] == "failed"]
        task, attempt = (tasks[0]["task_id"], int(tasks[0]["try_number"])) if tasks else ("", 0)
        cause = airflow.error(ROLLBACK, run, task, attempt) if tasks else None
        raise DropforgeError(f"run {run} of {ROLLBACK}", cause or "it failed", f"See {page}")
