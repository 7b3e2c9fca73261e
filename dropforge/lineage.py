"""What became of a dataset version: the runs that trained on it, those that went on from them, and their models."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dropforge import tracking
from dropforge.errors import DropforgeError
from dropforge.run import RunSpec
from dropforge.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_IN_ADDRESS: Final = re.compile(r"(?:^|/)runs/([^/]+)/")
_IN_TAG: Final = re.compile(r"\brun ([a-z0-9-]+), digest ")


def runs(store: Store) -> dict[str, RunSpec]:
    """All runs of the bucket, by name; what cannot be read is none."""
    found: dict[str, RunSpec] = {}
    for info in store.list("runs/"):
        if info.key.count("/") == 2 and info.key.endswith("/run.json"):
            with suppress(DropforgeError):
                found[info.key.split("/")[1]] = RunSpec.read(store, info.key)
    return found


def registered(mlflow: MlflowClient) -> list[ModelVersion]:
    """All model versions of the server."""
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = mlflow.search_model_versions(max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def knowing(
    digests: Collection[str], specs: Mapping[str, RunSpec], versions: Sequence[ModelVersion]
) -> list[ModelVersion]:
    """Model versions that were trained on one of the datasets, or that began with the weights of one that was.

    :param digests: of dataset versions. :param specs: see `runs`; a run whose folder is gone is known by its models.
    """
    reached = _reached(digests, specs, versions)
    return [version for version in versions if version.tags.get(tracking.TAG_RUN) in reached]


def unfinished(
    mlflow: MlflowClient, digests: Collection[str], specs: Mapping[str, RunSpec], versions: Sequence[ModelVersion]
) -> tuple[dict[str, str], list[str]]:
    """Names of the runs on one of the datasets, or on weights of such a run, that may still become a model, and of
    those that were stopped or failed before they had one; of a trial that has ended with the run of its sweep in
    Airflow, which may choose it.
    """
    whole = [version for version in versions if tracking.TAG_CHECKPOINT not in version.tags]
    done = {version.tags.get(tracking.TAG_RUN) for version in whole}
    going, ended = dict[str, str](), list[str]()
    for name in sorted(_reached(digests, specs, versions) & specs.keys() - done):
        tracked, sweep = specs[name].tracking, specs[name].drop.get("sweep")
        status = _status(mlflow, tracked.run_id) if tracked is not None else ""
        if status in _GOING:
            going[name] = ""
        elif sweep and _status(mlflow, str(sweep["parent"])) in _GOING:
            going[name] = str(sweep["by"])
        elif status in _ENDED:
            ended.append(name)
    return going, ended


_GOING: Final = {"RUNNING", "SCHEDULED"}
_ENDED: Final = {"FAILED", "KILLED"}


def _status(mlflow: MlflowClient, run_id: str) -> str:
    """Of a run in MLflow; empty if it is deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return str(mlflow.get_run(run_id).info.status)
    except MlflowException as error:
        if error.error_code not in tracking.NOT_THERE:
            raise
        return ""


def _reached(digests: Collection[str], specs: Mapping[str, RunSpec], versions: Sequence[ModelVersion]) -> set[str]:
    """Names of the runs whose weights know one of the datasets."""
    parents: dict[str, set[str]] = {name: _parents(spec) for name, spec in specs.items()}
    reached = {name for name, spec in specs.items() if spec.dataset_digest in digests}
    for version in versions:
        run = version.tags.get(tracking.TAG_RUN, "")
        parents.setdefault(run, set()).update(_IN_TAG.findall(version.tags.get(tracking.TAG_START, "")))
        if version.tags.get(tracking.TAG_DATASET) in digests:
            reached.add(run)
    while more := {name for name, begun in parents.items() if name not in reached and begun & reached}:
        reached |= more
    return reached


def _parents(spec: RunSpec) -> set[str]:
    """Runs whose weights a run began with: by `base.start`, or by the address of its base model."""
    found = set(_IN_ADDRESS.findall(f"{(spec.recipe.get('base') or {}).get('model') or ''}/"))
    return found | ({spec.start.run} if spec.start is not None and spec.start.run else set())
