"""`dropforge env`: what a shell has to know so that other programs, as MLflow's client, reach the embedded stack."""

from __future__ import annotations

import os
import shlex
import sys

import typer

from dropforge.cli.connect import StateOption
from dropforge.client.connection import BEFORE_OURS, running_stack
from dropforge.errors import DropforgeError
from dropforge.proxies import proxies, spared


def env(state: StateOption = None) -> None:
    """Print the environment of a client of this stack, for `eval "$(dropforge env)"`. It holds credentials.

    With it `mlflow`, `aws` and Python in this shell speak with the stack.
    """
    stack = running_stack(state, "Start it with `dropforge up`")
    if sys.stdout.isatty():
        raise DropforgeError(
            "the environment", "it would be shown on this terminal", 'Pass it on: `eval "$(dropforge env)"`'
        )
    typer.echo(f"unset {' '.join(BEFORE_OURS)}")
    unseen = spared(os.environ) if proxies(os.environ) else {}
    for name, value in {**stack.env(), **unseen}.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
