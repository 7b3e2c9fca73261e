"""How a command finds the services: the running stack of the state folder, else the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dropforge import settings
from dropforge.cli.airflow import Airflow
from dropforge.errors import DropforgeError
from dropforge.settings import Settings
from dropforge.stack.state import check_folder, is_running, read_state
from dropforge.store import S3Store, Store

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the embedded stack.", envvar="DROPFORGE_STATE", show_default=".dropforge"),
]


class Connection(NamedTuple):
    """What the commands talk to. `stack` is the folder of the embedded stack; None where the services are others'."""

    settings: Settings
    store: Store
    airflow: Airflow
    stack: Path | None = None


def connect(state: Path | None) -> Connection:
    """Connect to the stack of the state folder, or to the services that the environment names.

    :raises DropforgeError: if neither is there.
    """
    folder = check_folder(state or settings.default_state())
    stack = read_state(folder)
    if stack is None:
        found = settings.from_env()
        login = (os.environ.get("AIRFLOW_USERNAME", ""), os.environ.get("AIRFLOW_PASSWORD", ""))
        return Connection(found, S3Store(found.bucket), Airflow(found.airflow_url, *login))
    if not is_running(folder):
        raise DropforgeError(f"stack in {folder}", "it is not running", "Start it with `dropforge up`")
    os.environ.update(stack.env())
    found = stack.settings
    return Connection(found, S3Store(found.bucket), Airflow(found.airflow_url, *stack.login), folder)
