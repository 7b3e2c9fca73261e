"""`dropforge secret`: what the training pods of a cluster have to know, as a Kubernetes secret."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
import yaml

from dropforge.cli.connect import StateOption
from dropforge.client.connection import running_stack
from dropforge.errors import DropforgeError
from dropforge.job import SECRET

OF_THE_HUB = ("HF_TOKEN", "HF_ENDPOINT")  # of whoever prints the secret: the right to a base model, and where it is


def secret(
    state: StateOption = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the training jobs.")] = "default",
) -> None:
    """Print the secret with which training pods reach this stack, for `| kubectl apply -f -`. It holds credentials.

    They include HF_TOKEN and HF_ENDPOINT of this environment.
    """
    stack = running_stack(state, "Start it with `dropforge up --pod-host ADDRESS`")
    own = {name: value for name in OF_THE_HUB if (value := os.environ.get(name))}
    values = stack.pod_env() | own
    if sys.stdout.isatty():
        raise DropforgeError(
            "the secret", "it would be shown on this terminal", "Pass it on: `dropforge secret | kubectl apply -f -`"
        )
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "type": "Opaque",
        "stringData": values,
    }
    typer.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)
