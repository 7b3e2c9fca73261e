"""An opened run, as the tasks after `open_run` know it."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from dropforge import layout, sweeps
from dropforge.run import RunSpec
from dropforge.store import Store


class Opened(TypedDict):
    """Addresses of the run, the manifests of its jobs, and the Unix time from which the training waits.

    `tokenise` is empty where the recipe does not ask for it, `train` where the run has its model already.
    """

    run: str
    family: str
    root: str
    mlflow_run: str
    mlflow_url: str
    backend: str
    retries: int
    opened_at: float
    tokenise: dict[str, Any]
    train: dict[str, Any]
    evaluate: dict[str, Any]
    sweep: NotRequired[sweeps.Member | None]


def read_spec(store: Store, run: str) -> RunSpec:
    """The run as it was opened."""
    return RunSpec.read(store, layout.run_key(run))
