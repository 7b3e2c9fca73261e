"""Which run a person means, and what MLflow knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dropforge import tracking
from dropforge.cli.airflow import FINETUNE
from dropforge.cli.comparing.find import Row, find_runs, names_like, of_dag_run, tags_of
from dropforge.cli.connect import Connection, connect
from dropforge.cli.drops import find_dag_run
from dropforge.cli.patience import asking_rest
from dropforge.errors import DropforgeError
from dropforge.mlflow_pages import run_page
from dropforge.rest import Rest


@dataclass(frozen=True)
class Named:
    """A run.

    :param title: as the person has named it. :param dag_run: its id in Airflow.
    :param row: as MLflow gives it; None before the run was opened there.
    """

    title: str
    dag_run: str
    row: Row | None = None

    @property
    def tags(self) -> Mapping[str, str]:
        return tags_of(self.row) if self.row else {}

    @property
    def params(self) -> Mapping[str, str]:
        """The flat recipe, as its text in MLflow."""
        rows = self.row["data"].get("params", []) if self.row else []
        return {str(item["key"]): str(item["value"]) for item in rows}

    @property
    def run(self) -> str:
        """The run's name; empty before it was opened."""
        return self.tags.get(tracking.TAG_RUN, "")

    @property
    def mlflow_run(self) -> str:
        """Id of its MLflow run; empty before it was opened."""
        return str(self.row["info"]["run_id"]) if self.row else ""

    def mlflow_page(self, tracking_uri: str) -> str:
        """Address of its page in MLflow; empty before it was opened."""
        if self.row is None:
            return ""
        return run_page(tracking_uri, str(self.row["info"]["experiment_id"]), self.mlflow_run)


def find(connection: Connection, word: str) -> Named:
    """A run by its name, by FAMILY@ALIAS, by FAMILY/DROP, or by its id in Airflow.

    :raises DropforgeError: if there is no such run, or MLflow does not answer.
    """
    uri = connection.settings.tracking_uri
    if "__" in word:  # as Airflow names runs, and we never do
        connection.airflow.dag_run(FINETUNE, word)
        return opened(connection, word, word)
    if word.count("/") == 1:
        dag_run, title = find_dag_run(connection, word)
        return opened(connection, dag_run, title)
    with asking_rest(uri), ThreadPoolExecutor(1) as pool:
        (found,) = find_runs(Rest(uri), [word], pool)
    dag_run = tags_of(found.row).get(tracking.TAG_DAG_RUN, "")
    if not dag_run:
        raise DropforgeError(
            f"run {word}", "Airflow did not start it: MLflow knows no DAG run of it", "List runs with `dropforge runs`"
        )
    return Named(word, dag_run, found.row)


def opened(connection: Connection, dag_run: str, title: str) -> Named:
    """The run of a DAG run, as far as it has come."""
    uri = connection.settings.tracking_uri
    with asking_rest(uri):
        return Named(title, dag_run, of_dag_run(Rest(uri), dag_run))


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    try:
        state = context.params.get("state")
        connection = connect(Path(state) if state else None)
        # The shell prints them as they are.
        return [name for name in names_like(Rest(connection.settings.tracking_uri), incomplete) if name.isprintable()]
    except Exception:  # nobody to ask: the shell completes nothing
        return []


RunArgument = Annotated[
    str,
    typer.Argument(
        help="A run as `dropforge runs` names it, FAMILY/DROP or an Airflow run id.",
        autocompletion=_complete,
        metavar="RUN",
    ),
]
