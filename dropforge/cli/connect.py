"""The option that names a stack, and how its logins are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dropforge.stack.secrets import secrets_path
from dropforge.stack.state import StackState
from dropforge.terminal import Console

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the embedded stack.", envvar="DROPFORGE_STATE", show_default=".dropforge"),
]


def login_text(page: Literal["airflow", "mlflow"], stack: StackState, console: Console) -> str:
    """User and password as markup; what is no terminal may be a log, and is told where the password is."""
    user, password = stack.login if page == "airflow" else stack.mlflow_login
    where = f"{page}_password of {secrets_path(stack.folder)} (a terminal shows it)"
    shown = f"[bold]{password}[/]" if console.is_terminal else where
    return f"user [bold]{user}[/], password {shown}"
