"""`dropforge runs`: the runs that MLflow has, and those that failed too early for that, which only Airflow knows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dropforge import layout, ledger, tracking
from dropforge.cli.airflow import FINETUNE
from dropforge.cli.connect import Connection, StateOption, connect
from dropforge.cli.history import read_points
from dropforge.cli.patience import asking_mlflow
from dropforge.cli.watch import read_stages, why_failed
from dropforge.drop import parse_partition_key
from dropforge.errors import DataError, DropforgeError
from dropforge.store import MissingObjectError

_DROP_ID = re.compile(r"[0-9a-f]{32}")
_REASON = 300  # characters
console = Console()


class Row(NamedTuple):
    """One line of the list. `began` is in seconds since 1970."""

    began: float
    run: str
    status: str
    version: str = "-"
    loss: str = "-"
    tries: str = "-"
    verdict: str = "-"


def runs(
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20,
    state: StateOption = None,
) -> None:
    """List runs, the newest first."""
    connection = connect(state)
    with asking_mlflow(connection.settings.tracking_uri):
        found, opened = _tracked(connection, family, limit)
    try:
        # Behind a full list only what is newer than its last row is of interest.
        since = found[-1].began if len(found) == limit else 0.0
        found += _untracked(connection, family, limit, since, opened)
        missing = ""
    except DropforgeError as error:
        missing = f"Runs that failed before training are not listed: {error.thing}, {error.cause}."
    table = Table(
        *(Column(name, no_wrap=True) for name in ("run", "status", "version", "eval loss", "tries")),
        "verdict",
        box=None,
        header_style="bold",
    )
    for row in sorted(found, key=lambda row: row.began, reverse=True)[:limit]:
        table.add_row(*(Text(cell) for cell in row[1:]))  # as plain text: names from outside may look like markup
    console.print(table if found else "There are no runs yet. Start one with `dropforge drop PATH --family NAME`.")
    if missing:
        console.print(Text(missing, "yellow"))


def _tracked(connection: Connection, family: str | None, limit: int) -> tuple[list[Row], set[str]]:
    """The runs that MLflow has, and the DAG runs that opened them."""
    uri = connection.settings.tracking_uri
    rows, opened = [], set()
    for item in tracking.search(tracking.client(uri), tracking.TAG_RUN, family=family, limit=limit):
        tags = item.data.tags
        opened.add(tags.get(tracking.TAG_DAG_RUN, ""))
        points = list(read_points(uri, item.info.run_id, "eval/loss", most=2).values())  # the first and the last
        rows.append(
            Row(
                item.info.start_time / 1000,
                tags.get(tracking.TAG_RUN, ""),
                item.info.status,
                tags.get(tracking.TAG_VERSION, "-"),
                f"{points[0]:.3f} → {points[-1]:.3f}" if points else "-",
                tags.get(tracking.TAG_ATTEMPT, "-"),
                _short(tags.get(tracking.TAG_VERDICT, "-")),
            )
        )
    return rows, opened


def _untracked(connection: Connection, family: str | None, limit: int, since: float, opened: set[str]) -> Iterator[Row]:
    """The newest runs that failed before they opened a run in MLflow. :raises DropforgeError: if Airflow is away."""
    airflow = connection.airflow
    for run in airflow.newest_runs(FINETUNE, 100, state="failed"):
        name, began = run["dag_run_id"], datetime.fromisoformat(run["start_date"] or run["run_after"]).timestamp()
        if name in opened or began < since:
            continue
        of, drop = _asked_for(connection, run)
        if family not in {None, of}:
            continue
        stages = read_stages(airflow, name)
        if any(stage.name == "open_run" and stage.state == "success" for stage in stages):
            continue  # beyond the limit, or deleted in MLflow
        stage, cause = why_failed(airflow, name, stages) or ("it", f"see {airflow.page(FINETUNE, name)}")
        verdict = f"{stage} failed: {textwrap.shorten(cause, _REASON, placeholder=' …')}"
        yield Row(began, drop or name, "FAILED", verdict=verdict)
        limit -= 1
        if not limit:
            return


def _asked_for(connection: Connection, run: Mapping[str, Any]) -> tuple[str, str]:
    """Family of a DAG run, and its drop as FAMILY/DROP; empty where they are not known."""
    conf = run.get("conf") or {}
    family, drop = str(conf.get("family") or ""), str(conf.get("drop") or "")
    try:
        if key := run.get("partition_key"):
            named = parse_partition_key(key)
            family, drop = named["family"], named["drop"]
        elif _DROP_ID.fullmatch(drop):
            drop = ledger.read(connection.store, family, drop).drop
        elif "/" in drop:
            family, _, drop = drop.removeprefix(layout.DROPS).partition("/")
    except (DataError, MissingObjectError):
        return family, ""
    return family, f"{family}/{drop}" if family and drop else ""


def _short(verdict: str) -> str:
    """Why a model was held back; that it beat everybody needs no words."""
    return "promote" if verdict.startswith("promote:") else verdict
