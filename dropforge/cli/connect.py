"""The option that names a stack, and how its logins are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropforge.stack.secrets import secrets_path
from dropforge.terminal import Console

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the embedded stack.", envvar="DROPFORGE_STATE", show_default=".dropforge"),
]


def login_text(user: str, password: str, folder: Path, console: Console) -> str:
    """User and password as markup; what is no terminal may be a log, and is told where the password is."""
    shown = f"[bold]{password}[/]" if console.is_terminal else f"in {secrets_path(folder)}"
    return f"user [bold]{user}[/], password {shown}"
