"""How far a run is: its stages as Airflow has them, and its training as MLflow has it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropforge import tracking
from dropforge.client.airflow import FINETUNE, Airflow, NoSuchRunError
from dropforge.client.connection import Connection
from dropforge.client.history import Course
from dropforge.client.patience import Patience, asking_mlflow
from dropforge.errors import DropforgeError
from dropforge.stages import JOBS, NOTHING_NEW, STAGES
from dropforge.text import read_count, shorten
from dropforge.tracking import Finished

if TYPE_CHECKING:
    from kubeflow_training.jobs.observation import Observation

ENDED = frozenset({"success", "failed"})
_AT_WORK = frozenset({"running", "deferred"})
_FIRST = 10.0  # seconds of silence that the first look bears
_LONGEST_CAUSE = 300


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


def find_earlier(airflow: Airflow, dag_run: str, stages: Sequence[Stage]) -> Finished | None:
    """Return the run that had the same rows and recipe, and has finished, where a DAG run found nothing new to do.

    :param stages: of the DAG run.
    """
    if not any(stage.name == "open_run" and stage.state == "skipped" for stage in stages):
        return None
    found = airflow.xcom(FINETUNE, dag_run, "open_run", NOTHING_NEW)
    if not isinstance(found, dict):
        return None
    return Finished(*(str(found.get(one.name, "")) for one in fields(Finished)))


def looks(
    connection: Connection, dag_run: str, title: str, seconds: float = 1.0, until: float = math.inf
) -> Iterator[View]:
    """Look at a run again and again until it has ended.

    :param seconds: between looks. :param until: when the last look is due at the latest, by `time.monotonic`.
    :raises DropforgeError: if the stack is stopped meanwhile, or Airflow has not answered for `patience.LIMIT` seconds.
    """
    watcher, patience = Watcher(connection, dag_run, title), Patience(connection.stack, f"dropforge follow {title}")
    while True:
        try:
            view = watcher.look()
            break
        except NoSuchRunError:
            raise
        except DropforgeError as error:  # as below, but what has never answered may be another address
            patience.check_stack()
            patience.bear(error, _FIRST)
            time.sleep(min(seconds, 1.0))
    patience.answered()
    while True:
        yield view
        if view.state in ENDED:
            return
        time.sleep(max(0.0, min(seconds, until - time.monotonic())))
        try:
            view = watcher.look()
        except DropforgeError as error:
            patience.check_stack()
            patience.bear(error)  # Airflow may be away for a moment while it is restarted
            continue
        patience.answered()
        if view.state not in ENDED:
            patience.check_stack()


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
