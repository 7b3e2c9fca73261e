"""An opened run, as the tasks after `open_run` know it."""

from __future__ import annotations

import json
from typing import Any, Final, NotRequired, TypedDict

from dropforge import layout, sweeps
from dropforge.run import RunSpec
from dropforge.store import Store, read_bounded

_LARGEST: Final = 32 << 20


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
    return RunSpec.from_json(read_bounded(store, layout.run_key(run), _LARGEST))


def read_json(store: Store, key: str) -> dict[str, Any]:
    """A JSON object of the run's folder, where pods write. :raises TooLargeError: if it has more than 32 MiB."""
    value: dict[str, Any] = json.loads(read_bounded(store, key, _LARGEST))
    return value
