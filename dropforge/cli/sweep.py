"""`dropforge sweep`: several trials of one recipe, followed to their winner."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from botocore.exceptions import BotoCoreError, ClientError
from rich.live import Live
from rich.table import Table

from dropforge import sweep_tracking, sweeps, tracking
from dropforge.cli.connect import StateOption
from dropforge.cli.recipes import FamilyOption
from dropforge.cli.submit import OTHER, check, source, tell_paused
from dropforge.client.airflow import SWEEP, NoSuchRunError, RunExistsError
from dropforge.client.connection import Connection, connect
from dropforge.client.patience import Patience, asking_mlflow
from dropforge.client.progress import ENDED
from dropforge.errors import DropforgeError
from dropforge.layout import check_family
from dropforge.mlflow_pages import run_page
from dropforge.recipes.load import merge
from dropforge.rest import STRANGE, UNANSWERED
from dropforge.stopping import Curve
from dropforge.sweep import Sweep, build_sweep, read_sweep
from dropforge.terminal import Console, Text
from dropforge.text import read_count

_TRIAL: Final = "trial"
_DECISIVE: Final = ("plan", "best", "start", "candidate", "report")  # the tasks that end a sweep if they fail
_LOOK: Final = 2.0  # seconds
_WORDS: Final = {
    "success": ("done", "green"),
    "failed": ("failed", "red"),
    "skipped": ("stopped early", "yellow"),
    "upstream_failed": ("not begun", "dim"),
    "removed": ("not begun", "dim"),
}
console = Console(soft_wrap=True)


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep's file.", metavar="FILE", exists=True, dir_okay=False)],
    family: FamilyOption,
    drop: Annotated[
        str | None, typer.Option(help="An uploaded drop: FAMILY/DROP, its name, or its id in the ledger.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"Other data: {OTHER}.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trials, and start nothing.")] = False,
    again: Annotated[
        int, typer.Option(help="A higher number starts the same sweep on the same data again.", min=1)
    ] = 1,
    watch: Annotated[bool, typer.Option("--follow", help="Follow it to its end.")] = False,
    state: StateOption = None,
) -> None:
    """Try values of a recipe's keys in trials side by side; the best model becomes the family's candidate.

    Run again, the command finds the sweep that it has started, and follows it.
    """
    asked = read_sweep(file)
    if data is not None:
        told = {**asked.plain(), "recipe": merge(asked.recipe, {"data": {"source": source(data)}})}
        asked = build_sweep(told)
    trials = asked.made()
    for trial in trials:
        check(asked.whole(trial), drop)
    metric = asked.whole(trials[0]).promote.metric
    console.print(draw(asked, View(metric)))
    if dry_run:
        console.print(Text(f"{len(trials)} trials, {asked.at_once} at once; nothing is started"))
        return
    conf = {"sweep": asked.plain(), "family": check_family(family), "drop": drop}
    connection = connect(state)
    run = start(connection, run_id(conf, again), conf, f"--again {again + 1}")
    if not watch:
        console.print(Text(f"Follow it with the same command and --follow, or at {page(connection, run)}"))
        console.print(Text(f"Stop it with `dropforge stop {run}`"))
        return
    raise typer.Exit(follow(connection, asked, family, run, metric))


def run_id(conf: Mapping[str, Any], again: int = 1) -> str:
    """The sweep's run in Airflow: the same sweep of the same data has the same."""
    digest = hashlib.sha256(json.dumps(conf, sort_keys=True).encode()).hexdigest()[:12]
    return f"sweep__{conf['family']}__{digest}" + (f"__{again}" if again > 1 else "")


def start(connection: Connection, run: str, conf: dict[str, Any], anew: str) -> str:
    """Start the sweep, or find it started. :param anew: the option for another one.

    :raises DropforgeError: if it has failed.
    """
    airflow = connection.airflow
    try:
        there = airflow.dag_run(SWEEP, run)
    except NoSuchRunError:
        try:
            airflow.trigger(SWEEP, conf, run)
        except RunExistsError:  # started from another terminal at this moment
            there = airflow.dag_run(SWEEP, run)
        else:
            console.print(Text(f"Sweep {run}: {page(connection, run)}"))
            if airflow.is_paused(SWEEP):
                tell_paused(SWEEP, "sweep")
            return run
    if there["state"] == "failed":
        raise DropforgeError(
            f"sweep {run}",
            "it has failed, or was ended",
            f"Clear its failed tasks at {page(connection, run)} to continue, or start it again with {anew}",
        )
    console.print(Text(f"Sweep {run} was started before: {there['state']}. Another one: {anew}"))
    return run


def page(connection: Connection, run: str) -> str:
    return connection.airflow.page(SWEEP, run)


@dataclass
class View:
    """What is known of a sweep's trials, by their numbers."""

    metric: str
    states: Mapping[int, str] = field(default_factory=dict)
    opened: Mapping[int, sweeps.Noted] = field(default_factory=dict)
    curves: Mapping[int, Curve] = field(default_factory=dict)

    def word(self, number: int) -> tuple[str, str]:
        """A trial's state, and its colour."""
        state = self.states.get(number, "")
        return _WORDS.get(state) or (("running", "cyan") if number in self.opened else ("waits", "dim"))


def look(connection: Connection, family: str, run: str, before: View) -> View:
    """The trials as they are now; of what does not answer, as they were."""
    states = connection.airflow.mapped_states(SWEEP, run, _TRIAL)
    try:
        opened: Mapping[int, sweeps.Noted] = sweeps.noted(connection.store, family, run)
    except (BotoCoreError, ClientError):
        opened = before.opened
    try:
        ids = {number: one.mlflow_run for number, one in opened.items()}
        curves: Mapping[int, Curve] = sweep_tracking.curves(connection.settings.tracking_uri, ids, before.metric)
    except (*UNANSWERED, *STRANGE):
        curves = before.curves
    return View(before.metric, states, opened, curves)


def draw(asked: Sweep, view: View) -> Table:
    """All trials, a line each."""
    table = Table("trial", "values", "state", "step", view.metric, box=None)
    for trial in asked.made():
        word, colour = view.word(trial.number)
        curve = view.curves.get(trial.number) or {}
        last = max(curve, default=None)
        table.add_row(
            str(trial.number),
            Text(trial.told),
            Text(word, style=colour),
            "" if last is None else str(last),
            "" if last is None else f"{curve[last]:.4f}",
        )
    return table


def follow(connection: Connection, asked: Sweep, family: str, run: str, metric: str) -> int:
    """Show the trials until the sweep ends, then its winner; the exit code."""
    patience = Patience(connection.stack, "dropforge sweep FILE --follow")
    view, shown = View(metric), dict[int, str]()
    with Live(draw(asked, view), console=console, refresh_per_second=4) as live:
        while True:
            try:
                state = str(connection.airflow.dag_run(SWEEP, run)["state"])
                view = look(connection, family, run, view)
                patience.answered()
            except DropforgeError as error:
                patience.check_stack()
                patience.bear(error)
                time.sleep(_LOOK)
                continue
            live.update(draw(asked, view))
            for trial in asked.made() if not console.is_terminal else ():
                if shown.get(trial.number) != (word := view.word(trial.number)[0]):
                    shown[trial.number] = word
                    console.print(Text(f"trial {trial.number} ({trial.told}): {word}"))
            if state in ENDED:
                break
            patience.check_stack()
            time.sleep(_LOOK)
    return tell_end(connection, asked, family, run, state)


def tell_end(connection: Connection, asked: Sweep, family: str, run: str, state: str) -> int:
    """Say which trial is the best, what became of its model, and where to look."""
    uri = connection.settings.tracking_uri
    with asking_mlflow(uri):
        found = tracking.search(tracking.client(uri), tracking.TAG_SWEEP, run, family=family, limit=1)
    console.line()
    if found:
        tags = found[0].data.tags
        best, trials = read_count(tags.get("dropforge.best_trial", "")), asked.made()
        if best is not None and best < len(trials):
            console.print(Text(f"The best is trial {best}, {trials[best].told}: run {tags.get(tracking.TAG_BEST)}"))
        if version := tags.get(tracking.TAG_VERSION):
            console.print(Text(f"It is version {version} of {family}: {tags.get(tracking.TAG_VERDICT, '')}"))
        info = found[0].info
        console.print(Text(f"MLflow: {run_page(uri, info.experiment_id, info.run_id)}"))
    if state != "success":
        console.print(Text(f"The sweep has failed{_why(connection, run)}; see {page(connection, run)}", style="red"))
    return 0 if state == "success" else 1


def _why(connection: Connection, run: str) -> str:
    """The task that decided so, and the error that its log ends with; empty if none is known."""
    try:
        states = {task["task_id"]: task for task in connection.airflow.task_states(SWEEP, run)}
        failed = next(name for name in _DECISIVE if states.get(name, {}).get("state") == "failed")
        cause = connection.airflow.error(SWEEP, run, failed, int(states[failed]["try_number"]))
    except (DropforgeError, StopIteration):
        return ""
    return f" at {failed}: {cause}" if cause else f" at {failed}"
