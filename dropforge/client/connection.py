"""How a client finds the services: by the folder that was named, the environment, or the default folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from dropforge import settings
from dropforge.base_config import check_folder_there
from dropforge.client.airflow import Airflow
from dropforge.errors import DropforgeError, RecipeError
from dropforge.readable import Readable, check_reads, readable
from dropforge.recipe import Recipe
from dropforge.settings import Settings
from dropforge.stack.kubeconfig import kubeconfig_env
from dropforge.stack.listeners import other_user
from dropforge.stack.state import StackState, check_folder, running_state, state_path
from dropforge.store import S3Store, Store

#: Of other services; they would go before the address and login of the stack, or keep boto3 from both.
BEFORE_OURS: Final = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_REGISTRY_URI",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_SQS",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
)


class Connection(NamedTuple):
    """What a client talks to.

    :param stack: the folder of the embedded stack; None where the services are others'. :param readable: what its
        recipes may have read, as `DROPFORGE_READABLE` says it; None where that is not known here.
    """

    settings: Settings
    store: Store
    airflow: Airflow
    stack: Path | None = None
    readable: str | None = None

    @property
    def reads(self) -> Readable | None:
        """What recipes may have read; None where that is not known here."""
        return None if self.readable is None else readable({settings.READABLE: self.readable})

    def check_recipe(self, family: str | None, recipe: Recipe) -> None:
        """Hold a recipe to what the embedded stack lets be read and to what its machine has, as the run does.

        :param family: of the run; None if it may be any.
        :raises RecipeError: naming the key, and what may be read or is there.
        """
        allowed = self.reads
        if allowed is None:
            return
        if family is None:
            allowed = replace(allowed, families=("*",))
        check_reads(self.store, self.settings.bucket, family or "", recipe, allowed)
        check_folder_there(recipe, allowed.folders)
        if recipe.compute.backend == "local" and self.stack is not None:
            from kubeflow_training.jobs.local import LocalCluster
            from kubeflow_training.jobs.local.capacity import NEVER_FITS_MEND, Resources

            if why := LocalCluster(self.stack / "cluster").never_fits(Resources(*recipe.compute.all_pods)):
                raise RecipeError("recipe section `compute`", why, NEVER_FITS_MEND)


def stack_folder(state: Path | None) -> Path | None:
    """Where to look for an embedded stack; None where the environment names a bucket and nobody named a folder.

    A stack's own environment names both. A bucket alone was set by hand: a demo in the default folder, stopped or not,
    is not what was meant.

    :raises DropforgeError: for a folder that no stack could have.
    """
    if state is None and not os.environ.get("DROPFORGE_STATE") and os.environ.get("DROPFORGE_BUCKET"):
        return None
    return check_folder(state or settings.default_state())


def connect(state: Path | None) -> Connection:
    """Connect to the stack of the state folder, or to the services that the environment names.

    :raises DropforgeError: if neither is there.
    """
    folder = stack_folder(state)
    if folder is None or not state_path(folder).exists():
        if folder is not None and not os.environ.get("DROPFORGE_BUCKET"):
            mend = "Start it with `dropforge up`, or name its folder with `--state`"
            raise DropforgeError(
                f"stack in {folder}", "it is not running", f"{mend}; for services of your own set DROPFORGE_BUCKET"
            )
        found = settings.from_env()
        login = (os.environ.get("AIRFLOW_USERNAME", ""), os.environ.get("AIRFLOW_PASSWORD", ""))
        airflow = Airflow(found.airflow_url, *login, pages=os.environ.get("AIRFLOW__API__BASE_URL", ""))
        return Connection(found, S3Store(found.bucket), airflow)
    stack = running_stack(folder, "Start it with `dropforge up`")
    own = stack.env()
    own |= kubeconfig_env(folder / "kubeconfig-client", os.environ, own)
    for name in BEFORE_OURS:
        os.environ.pop(name, None)
    os.environ.update(own)
    found = stack.settings
    return Connection(found, S3Store(found.bucket), Airflow(found.airflow_url, *stack.login), folder, stack.readable)


def connect_embedded(state: Path | None) -> Connection | None:
    """Connect to the embedded stack of the state folder; None if none runs there, or the services are others'."""
    with suppress(DropforgeError):
        folder = stack_folder(state)
        if folder is not None and running_state(folder) is not None:
            return connect(state)
    return None


def running_stack(state: Path | None, mend: str) -> StackState:
    """The embedded stack of this folder, or of the default one.

    :raises DropforgeError: if it does not run, with the mend, or another user's program has one of its ports.
    """
    folder = check_folder(state or settings.default_state())
    stack = running_state(folder)
    if stack is None:
        raise DropforgeError(f"stack in {folder}", "it is not running", mend)
    for name, port in stack.ports.items():
        if (uid := other_user(port)) is not None:
            raise DropforgeError(
                f"port {port}, which is the stack's for {name}",
                f"a program of another user of this machine (uid {uid}) has taken it, and would receive your login",
                f"Choose another: `dropforge down`, then `dropforge up --{name}-port PORT`",
            )
    return stack
