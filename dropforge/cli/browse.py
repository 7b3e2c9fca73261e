"""`dropforge open`: the pages of Airflow and MLflow in the browser."""

from __future__ import annotations

import webbrowser
from enum import StrEnum
from typing import Annotated

import typer

from dropforge.cli.connect import StateOption, login_text
from dropforge.client.connection import connect, running_stack
from dropforge.errors import DropforgeError
from dropforge.terminal import Console


class Page(StrEnum):
    """A service with pages."""

    AIRFLOW = "airflow"
    MLFLOW = "mlflow"


def open_page(
    page: Annotated[Page, typer.Argument(help="The service whose pages are opened.", metavar="airflow|mlflow")],
    state: StateOption = None,
) -> None:
    """Open the pages of Airflow or MLflow in the browser, and print their address and login.

    The password is printed on a terminal alone; elsewhere the file that has it is named.
    """
    connection = connect(state)
    airflow = page is Page.AIRFLOW
    url = connection.airflow.pages if airflow else connection.settings.tracking_uri
    if not url.startswith(("http://", "https://")):
        name, where = ("DROPFORGE_AIRFLOW_URL", "Airflow") if airflow else ("MLFLOW_TRACKING_URI", "MLflow")
        cause = f"it is {url!r}, which is no address of a page" if url else "it is not set"
        raise DropforgeError(f"environment variable {name}", cause, f"Set it to the address of {where}'s pages")
    console = Console(soft_wrap=True, highlight=False)
    console.print(url, markup=False)
    if connection.stack is not None:
        stack = running_stack(connection.stack, "Start it again with `dropforge up`")
        console.print(login_text("airflow" if airflow else "mlflow", stack, console))
    if not webbrowser.open(url):
        raise DropforgeError("the browser", "none could be started here", f"Open {url} in one of yours")
