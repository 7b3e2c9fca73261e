"""A run as MLflow has it: its tags, its last figures and the course of a few of them. By REST: mlflow is heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

from dropforge import checkpoints, tracking
from dropforge.checkpoints import Checkpoint
from dropforge.errors import DropforgeError
from dropforge.rest import DeniedError, Rest, real, speaks_rest

CURVES: Final = ("train/loss", "eval/loss", "train/tokens_per_second")
POINTS: Final = 300  # of each curve; of more the server picks evenly
_LAST: Final = 2**31 - 1

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Course:
    """
    :param points: of each curve, by optimizer steps. :param kept: checkpoints as MLflow shows them, deleted ones too.
    :param champion_run: the MLflow run that made the version it was measured against; empty if there is none.
    """

    run_id: str
    experiment: str
    status: str
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    points: Mapping[str, Points] = field(default_factory=dict)
    kept: tuple[Checkpoint, ...] = ()
    champion_run: str = ""


def read(uri: str, run_id: str, dag_run: str) -> Course:
    """Read one run.

    :param dag_run: the run of the DAG that must have opened it.
    :raises DropforgeError: if another has, or MLflow is none that speaks REST. :raises Exception: as `Rest.call`.
    """
    if not speaks_rest(uri):
        raise DropforgeError("MLflow", "the pages read it by http only", "Set MLFLOW_TRACKING_URI to a server")
    rest = Rest(uri)
    run = rest.call("GET", f"runs/get?{urlencode({'run_id': run_id})}")["run"]
    info, data = run["info"], run["data"]
    tags = {str(tag["key"]): str(tag["value"]) for tag in data.get("tags", [])}
    if tags.get(tracking.TAG_DAG_RUN) != dag_run:
        raise DropforgeError(f"MLflow run {run_id}", "it belongs to another run of Airflow by now", "Look there")
    metrics = {str(item["key"]): real(item["value"]) for item in data.get("metrics", [])}
    experiment = str(info["experiment_id"])
    return Course(
        run_id=str(info["run_id"]),
        experiment=experiment,
        status=str(info["status"]),
        tags=tags,
        params={str(item["key"]): str(item["value"]) for item in data.get("params", [])},
        metrics=metrics,
        points={name: _points(rest, run_id, name) for name in CURVES if name in metrics},
        kept=tuple(checkpoints.checkpoints(rest, experiment, run_id)),
        champion_run=_maker(rest, tags.get(tracking.TAG_FAMILY, ""), tags.get(tracking.TAG_CHAMPION, "")),
    )


def _points(rest: Rest, run_id: str, name: str) -> Points:
    query = {"run_ids": run_id, "metric_key": name, "start_step": 0, "end_step": _LAST, "max_results": POINTS}
    found = rest.call("GET", f"metrics/get-history-bulk-interval?{urlencode(query)}").get("metrics", [])
    last = {int(point.get("step", 0)): real(point["value"]) for point in found}
    return tuple(sorted(last.items()))


def _maker(rest: Rest, family: str, version: str) -> str:
    if not family or not version:
        return ""
    try:
        query = urlencode({"name": family, "version": version})
        return str(rest.call("GET", f"model-versions/get?{query}")["model_version"].get("run_id") or "")
    except DeniedError:
        return ""  # somebody has deleted the version, or the model
