"""A run, from the upload that it waits for to the model that it made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection
from dropforge.client.drops import NotTakenError, wait_for_run
from dropforge.client.model import Model
from dropforge.client.named import check_begun
from dropforge.client.patience import asking_mlflow
from dropforge.client.progress import ENDED, View, find_earlier, find_mlflow_run, looks, read_stages, why_failed
from dropforge.client.s3 import asking_s3
from dropforge.client.versions import Version, registered
from dropforge.drop import Drop
from dropforge.errors import DataError, DropforgeError
from dropforge.mlflow_pages import run_page
from dropforge.recipe_params import with_defaults

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun

_TAKEN = 120.0  # seconds within which intake gives a drop its run, or says why it stands in line


_AGAIN = "a drop of the same data with `again=True` trains on them once more"


class RunFailedError(DropforgeError):
    """A run that has failed, or was ended."""


class StillRunningError(DropforgeError):
    """A run that has not ended in the time that it was given."""


class Run:
    """A run of the fine-tune DAG. Its properties ask Airflow and MLflow again each time.

    Where it found nothing new to do, what they say of MLflow is of the earlier run with the same rows and recipe.
    """

    def __init__(
        self, connection: Connection, name: str, *, dag_run: str | None = None, drop: Drop | None = None
    ) -> None:
        """:param name: by which a person knows it. :param drop: the one whose run it is, until `dag_run` is known."""
        self._connection, self._drop, self._dag_run = connection, drop, dag_run
        self.name = name

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    @property
    def dag_run(self) -> str:
        """Its id in Airflow; empty until a run has taken the drop."""
        try:
            return self._taken(0, 0)
        except NotTakenError:
            return ""

    @property
    def state(self) -> str:
        """`queued`, `running`, `success` or `failed`, as Airflow has it; `queued` for a drop without a run yet."""
        dag_run = self.dag_run
        return str(self._connection.airflow.dag_run(FINETUNE, dag_run)["state"] or "queued") if dag_run else "queued"

    def wait(
        self, timeout: float | None = None, on_progress: Callable[[View], None] = lambda _view: None, poll: float = 1.0
    ) -> Run:
        """Wait until it has ended; return itself.

        :param timeout: seconds, and what one more look takes; None waits as long as the run does.
        :param on_progress: called every `poll` seconds with stages, step and losses.
        :raises RunFailedError: with the stage that failed and its cause.
        :raises StillRunningError: after `timeout` seconds; nothing is stopped.
        :raises NotTakenError: if no run takes the drop within two minutes, and no rule of its family holds it back.
        """
        if not poll > 0:
            raise ValueError(f"poll is {poll}, and has to be more than 0 seconds")
        given = math.inf if timeout is None else max(0.0, timeout)
        end = time.monotonic() + given
        try:
            dag_run = self._taken(min(_TAKEN, given), max(0.0, given - _TAKEN))
        except NotTakenError as error:
            if time.monotonic() < end:
                raise
            cause = f"no run has taken its drop within {given:g} s"
            raise StillRunningError(f"run {self.name}", cause, "It is not forgotten; wait for it again") from error
        for view in looks(self._connection, dag_run, self.name, poll, end):
            on_progress(view)
            if view.state not in ENDED and time.monotonic() >= end:
                cause = f"it has not ended within {timeout:g} s"
                raise StillRunningError(f"run {self.name}", cause, "It continues; wait for it again")
        if view.state != "success":
            airflow = self._connection.airflow
            stage, cause = why_failed(airflow, dag_run, view.stages) or ("the run", "none of its stages says why")
            raise RunFailedError(f"run {self.name}", f"{stage} failed: {cause}", f"See {self.airflow_page}; {_AGAIN}")
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric; empty before the run is opened in MLflow."""
        run = self._tracked()
        return {} if run is None else dict(run.data.metrics)

    @property
    def params(self) -> dict[str, str]:
        """The recipe, flat, as text; empty before the run is opened in MLflow."""
        run = self._tracked()
        return {} if run is None else with_defaults(run.data.params)

    @property
    def verdict(self) -> str:
        """Why its model was promoted or not; empty before that is decided."""
        return self._tags().get(tracking.TAG_VERDICT, "")

    @property
    def model(self) -> Model:
        """The version that it registered. :raises DataError: if it registered none, or has not yet."""
        version = self._version()
        if version is None:
            raise DataError(f"run {self.name}", "it has registered no model", "Wait for it; `verdict` may say why")
        return Model(version.family, int(version.number), self._uri)

    @property
    def promoted(self) -> bool:
        """Whether its model was promoted, whoever holds the alias by now."""
        version = self._version()
        return version is not None and version.promoted

    @property
    def airflow_page(self) -> str:
        """Address of its page in Airflow; empty until a run has taken the drop."""
        dag_run = self.dag_run
        return self._connection.airflow.page(FINETUNE, dag_run) if dag_run else ""

    @property
    def mlflow_page(self) -> str:
        """Address of its page in MLflow; empty before the run is opened there."""
        run = self._tracked()
        return "" if run is None else run_page(self._uri, run.info.experiment_id, run.info.run_id)

    @property
    def _uri(self) -> str:
        return self._connection.settings.tracking_uri

    def _taken(self, seconds: float, in_line: float) -> str:
        """:param seconds, in_line: as of `wait_for_run`."""
        if self._dag_run is None:
            assert self._drop is not None
            with asking_s3():
                dag_run = wait_for_run(self._connection, self._drop, seconds, in_line)
            check_begun(self._connection, dag_run, self.name)
            self._dag_run = dag_run
        return self._dag_run

    def _tracked(self) -> MlflowRun | None:
        dag_run = self.dag_run
        with asking_mlflow(self._uri):
            run_id = find_mlflow_run(self._connection, dag_run) if dag_run else None
        if dag_run and run_id is None:
            airflow = self._connection.airflow
            earlier = find_earlier(airflow, dag_run, read_stages(airflow, dag_run))
            run_id = None if earlier is None else earlier.mlflow_run
        with asking_mlflow(self._uri):
            return tracking.client(self._uri).get_run(run_id) if run_id else None

    def _tags(self) -> Mapping[str, str]:
        run = self._tracked()
        return {} if run is None else run.data.tags

    def _version(self) -> Version | None:
        run = self._tracked()
        if run is None:
            return None
        with asking_mlflow(self._uri):
            return registered(tracking.client(self._uri), run)
