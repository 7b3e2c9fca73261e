"""An opened run, as the tasks after `open_run` know it."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from dropforge import sweeps
from dropforge.run import RunSpec
from dropforge.store import Store


class RunIdentity(TypedDict):
    """What Airflow keeps of a run's `run.json`, since the run's own pods may write that.

    `run_digest` is its SHA-256; a run that an earlier version opened has none.
    """

    run: str
    family: str
    root: str
    run_digest: NotRequired[str | None]


class Opened(RunIdentity):
    """Addresses of the run, the manifests of its jobs, and the Unix time from which the training waits.

    `tokenise` is empty where the recipe does not ask for it, `train` where the run has its model already.
    """

    mlflow_run: str
    mlflow_url: str
    backend: str
    retries: int
    opened_at: float
    tokenise: dict[str, Any]
    train: dict[str, Any]
    evaluate: dict[str, Any]
    sweep: NotRequired[sweeps.Member | None]


def read_spec(store: Store, opened: RunIdentity) -> RunSpec:
    """The run as it was opened. :raises UnreadableError: if its `run.json` is another by now."""
    return RunSpec.read_opened(store, opened["run"], opened["family"], opened["root"], opened.get("run_digest"))
