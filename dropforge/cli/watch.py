"""The live view of one run: stages, training progress, falling loss, tokens per second."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from dropforge import tracking
from dropforge.cli.airflow import FINETUNE, Airflow
from dropforge.cli.connect import Connection
from dropforge.cli.history import Course
from dropforge.cli.patience import Patience, asking_mlflow
from dropforge.errors import DropforgeError
from dropforge.scales import mean, share
from dropforge.stages import JOBS, STAGES
from dropforge.terminal import Console, Text
from dropforge.text import read_count, shorten

if TYPE_CHECKING:
    from kubeflow_training.jobs.observation import Observation

ENDED = frozenset({"success", "failed"})
_AT_WORK = frozenset({"running", "deferred"})
_MARKS = {
    "success": ("✓", "green"),
    "failed": ("✗", "red"),
    "upstream_failed": ("-", "dim"),
    "skipped": ("-", "dim"),
    "running": ("▶", "cyan"),
    "deferred": ("▶", "cyan"),
    "up_for_retry": ("↻", "yellow"),
    "awaiting_input": ("?", "yellow"),
}
_LONGEST_CAUSE = 300
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Stage:
    """One task of the DAG run."""

    name: str
    state: str = ""
    seconds: float | None = None
    attempt: int = 0
    cause: str = ""
    """Why it is tried again."""


@dataclass(frozen=True)
class View:
    """Everything the live view shows, and nothing else."""

    title: str
    state: str
    stages: tuple[Stage, ...]
    step: int | None = None
    steps: int | None = None
    losses: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    evals: tuple[float, ...] = ()
    note: str = ""
    job: str = ""


@dataclass
class Watcher:
    """Looks at one DAG run; every look is a whole picture, of which only what may have changed is fetched."""

    connection: Connection
    dag_run: str
    title: str
    mlflow_run: str | None = field(default=None, init=False)
    _trained: View | None = field(default=None, init=False)
    _causes: dict[tuple[str, int], str] = field(default_factory=dict, init=False)
    losses: Course = field(init=False)
    evals: Course = field(init=False)

    def look(self) -> View:
        run = self.connection.airflow.dag_run(FINETUNE, self.dag_run)
        stages = tuple(map(self._with_cause, read_stages(self.connection.airflow, self.dag_run)))
        view = View(title=self.title, state=str(run["state"]), stages=stages)
        opened = next(stage for stage in stages if stage.name == "open_run")
        if opened.state != "success":
            return view
        try:
            with asking_mlflow(self.connection.settings.tracking_uri):
                self._trained = self._with_training(view)
        except DropforgeError:
            # Airflow alone tells how far the run is.
            last = self._trained or view
            return replace(last, state=view.state, stages=stages, job="", note="MLflow does not answer")
        return self._trained

    def _with_cause(self, stage: Stage) -> Stage:
        """What the try before ended with: the next one may be minutes away, and end the same way."""
        if stage.state != "up_for_retry":
            return stage
        attempt = stage.name, stage.attempt
        if attempt not in self._causes:
            with suppress(DropforgeError):  # how far the run is matters more
                if found := self.connection.airflow.error(FINETUNE, self.dag_run, stage.name, stage.attempt):
                    self._causes[attempt] = shorten(found.partition("\n")[0], _LONGEST_CAUSE)
        return replace(stage, cause=self._causes.get(attempt, ""))

    def _with_training(self, view: View) -> View:
        uri = self.connection.settings.tracking_uri
        if self.mlflow_run is None:
            self.mlflow_run = find_mlflow_run(self.connection, self.dag_run)
            if self.mlflow_run is None:
                return view
            self.losses = Course(uri, self.mlflow_run, "train/loss")
            self.evals = Course(uri, self.mlflow_run, "eval/loss")
        data = tracking.client(uri).get_run(self.mlflow_run).data
        losses, evals = self.losses.read_on(), self.evals.read_on()
        seen = self._observe(view, data.tags.get(tracking.TAG_RUN, ""), data.params.get("compute.namespace", "default"))
        resumed = data.tags.get(tracking.TAG_RESUMED)
        return replace(
            view,
            step=max(self.losses.points, default=None),
            steps=_number(data.tags.get(tracking.TAG_STEPS)) or _number(data.params.get("train.max_steps")),
            losses=losses,
            tokens_per_second=data.metrics.get("train/tokens_per_second"),
            evals=evals,
            note=f"resumed from step {resumed}" if resumed else "",
            job=f"{seen.phase.value}: {seen.message}" if seen and seen.message else "",
        )

    def _observe(self, view: View, run: str, namespace: str) -> Observation | None:
        """What the job of the stage at work is doing; None between jobs, and for jobs of another machine."""
        from kubeflow_training.jobs.local import LocalCluster
        from kubeflow_training.jobs.observation import observe

        home = os.environ.get("KUBEFLOW_TRAINING_HOME")
        purpose = next((stage.name for stage in view.stages if stage.state in _AT_WORK and stage.name in JOBS), None)
        if home is None or purpose is None:
            return None
        # Each gang has a job of its own; the newest counts.
        labels = {"dropforge/run": run, "dropforge/purpose": purpose}
        found = LocalCluster(Path(home)).jobs(namespace, labels=labels)
        return observe(found[-1].job, found[-1].pods, found[-1].events) if found else None


def read_stages(airflow: Airflow, dag_run: str) -> tuple[Stage, ...]:
    """Every stage of a DAG run, begun or not."""
    tasks = {task["task_id"]: task for task in airflow.task_states(FINETUNE, dag_run)}
    return tuple(_stage(name, tasks.get(name)) for name in STAGES)


def find_mlflow_run(connection: Connection, dag_run: str) -> str | None:
    """The MLflow run that a DAG run opened."""
    mlflow = tracking.client(connection.settings.tracking_uri)
    found = tracking.search(mlflow, tracking.TAG_DAG_RUN, dag_run, limit=1)
    return found[0].info.run_id if found else None


def follow(connection: Connection, dag_run: str, title: str, console: Console, seconds: float = 1.0) -> View:
    """Show the run until it ends; returns the last picture.

    :raises DropforgeError: if the stack is stopped meanwhile, or Airflow has not answered for `patience.LIMIT` seconds.
    """
    watcher, patience = Watcher(connection, dag_run, title), Patience(connection.stack, f"dropforge follow {title}")
    view = watcher.look()
    shown: dict[str, str] = {}
    try:
        with Live(draw(view), console=console, refresh_per_second=4, transient=False) as live:
            while True:
                live.update(draw(view))
                if not console.is_terminal:
                    _tell(view, shown, console)
                if view.state in ENDED:
                    break
                time.sleep(seconds)
                try:
                    view = watcher.look()
                except DropforgeError as error:
                    patience.check_stack()
                    patience.bear(error)  # Airflow may be away for a moment while it is restarted
                    continue
                patience.answered()
                if view.state not in ENDED:
                    patience.check_stack()
    finally:
        if not console.is_terminal:
            console.line()  # the last picture ends without one
    return view


def why_failed(airflow: Airflow, dag_run: str, stages: Sequence[Stage]) -> tuple[str, str] | None:
    """The stage that failed first and the error that its log ends with; None if none failed."""
    stage = next((stage for stage in stages if stage.state == "failed"), None)
    if stage is None:
        return None
    try:
        cause = airflow.error(FINETUNE, dag_run, stage.name, max(1, stage.attempt))
    except DropforgeError:
        cause = None
    return stage.name, cause or f"its log names the cause: {airflow.page(FINETUNE, dag_run)}"


def draw(view: View) -> RenderableType:
    """The picture of one look."""
    table = Table.grid(padding=(0, 2))
    for stage in view.stages:
        mark, style = _MARKS.get(stage.state, ("·", "dim"))
        took = f"{stage.seconds:5.0f} s" if stage.seconds is not None else ""
        tries = f"try {stage.attempt}" if stage.attempt > 1 else ""
        table.add_row(Text(mark, style=style), Text(stage.name, style=style), took, tries)
    head = Text.assemble((view.title, "bold"), f"  {view.state}", (f"  {view.note}" if view.note else "", "yellow"))
    again = ((stage.name, stage.cause) for stage in view.stages if stage.cause)
    causes = [Text(f"{name} will be tried again: {cause}", "yellow") for name, cause in again]
    job = [Text(view.job, style="dim")] if view.job else []
    return Group(head, table, *causes, *job, *([_training(view)] if view.step is not None else []))


def _training(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    figures = [
        f"loss {view.losses[-1]:.3f}" if view.losses else "",
        f"{view.tokens_per_second:,.0f} tok/s" if view.tokens_per_second else "",
        f"eval {view.evals[0]:.3f} → {view.evals[-1]:.3f}" if view.evals else "",
    ]
    bar = [ProgressBar(total=view.steps, completed=view.step or 0, width=20)] if view.steps else []
    row.add_row(*bar, _step(view), *(figure for figure in figures if figure))
    return Group(row, Text(sparkline(view.losses, 60), style="magenta"))


def _step(view: View) -> str:
    """How far the training is; without the total where it is not known."""
    return f"step {view.step}/{view.steps}" if view.steps else f"step {view.step}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in `width` characters, each the mean of its share."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for place in range(width):
        part = finite[place * len(finite) // width : (place + 1) * len(finite) // width]
        means.append(mean(part))
    low, high = min(means), max(means)
    if low == high:
        return _BARS[0] * width
    return "".join(_BARS[round(share(value, low, high) * (len(_BARS) - 1))] for value in means)


def _tell(view: View, shown: dict[str, str], console: Console) -> None:
    """Without a terminal the picture cannot move, so changes are told line by line."""
    for stage in view.stages:
        word = f"{stage.state} try {stage.attempt}" if stage.attempt > 1 else stage.state
        if stage.state and shown.get(stage.name) != word:
            shown[stage.name] = word
            console.print(Text(f"{stage.name}: {word}" + (f": {stage.cause}" if stage.cause else "")))
    quarter = str((view.step or 0) * 4 // view.steps) if view.steps else ""
    if view.losses and shown.get("quarter") != quarter:
        shown["quarter"] = quarter
        console.print(f"train: {_step(view)}, loss {view.losses[-1]:.3f}", highlight=False)


def _stage(name: str, task: dict[str, Any] | None) -> Stage:
    if task is None:
        return Stage(name)
    start, end = task.get("start_date"), task.get("end_date")
    seconds = None
    if start:
        began = datetime.fromisoformat(start)
        ended = datetime.fromisoformat(end) if end else datetime.now(began.tzinfo)
        seconds = max(0.0, (ended - began).total_seconds())
    return Stage(name, str(task.get("state") or ""), seconds, int(task.get("try_number") or 0))


def _number(text: str | None) -> int | None:
    return read_count(text or "")
