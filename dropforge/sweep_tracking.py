"""A sweep in MLflow: one run for it, below which MLflow's pages show its trials."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlencode

from dropforge import tracking
from dropforge.rest import Rest, real
from dropforge.stopping import Curve
from dropforge.sweeps import CANDIDATE_RUN, Member, Outcome

#: Runs that are no trials, and those trials whose model became a candidate: conditions of MLflow's search.
NO_TRIAL: Final = f"tags.`{tracking.TAG_TRIAL}` IS NULL"
CANDIDATE: Final = f"tags.`{tracking.TAG_TRIAL}` LIKE '%' AND tags.`{tracking.TAG_DAG_RUN}` LIKE '{CANDIDATE_RUN}%'"
_POINTS: Final = 2500  # the server's limit


def trial_tags(by: Member) -> dict[str, str]:
    """Tags of a trial's MLflow run."""
    return {tracking.TAG_PARENT: by["parent"], tracking.TAG_TRIAL: str(by["trial"])}


def open_parent(
    tracking_uri: str, family: str, by: str, params: Mapping[str, str], tags: Mapping[str, str]
) -> tuple[str, str]:
    """Open the sweep's MLflow run, or the one that an earlier try opened; its id and its experiment's.

    :param by: the sweep's run in Airflow.
    """
    from mlflow.entities import Param, RunTag

    mlflow = tracking.client(tracking_uri)
    experiment = tracking.experiment_of(mlflow, family)
    found = tracking.search(mlflow, tracking.TAG_SWEEP, by, family=family, limit=1)
    all_tags = {
        tracking.TAG_SWEEP: by,
        tracking.TAG_DAG_RUN: by,
        tracking.TAG_FAMILY: family,
        "mlflow.user": "dropforge",
        **tags,
    }
    if found:
        run = found[0].info.run_id
        mlflow.update_run(run, status="RUNNING")
    else:
        run = mlflow.create_run(experiment, run_name=f"sweep {by}"[:200], tags=all_tags).info.run_id
    with tracking.failed_by_error(tracking_uri, run):
        known = mlflow.get_run(run).data.params
        new = [Param(key, value[:6000]) for key, value in params.items() if key not in known]
        mlflow.log_batch(run, params=new, tags=[RunTag(key, value[:4900]) for key, value in all_tags.items()])
    return run, experiment


def reopen(tracking_uri: str, run: str) -> None:
    """What was ended goes on: a part of its sweep was cleared."""
    tracking.client(tracking_uri).update_run(run, status="RUNNING")


def tell_best(tracking_uri: str, parent: str, winner: Outcome, metric: str, text: str) -> None:
    """Put the best trial's figure and run on the sweep's MLflow run, and the table of all beside it."""
    from mlflow.entities import Metric, RunTag

    assert winner.value is not None
    mlflow = tracking.client(tracking_uri)
    before = mlflow.get_run(parent).data.tags
    if before.get(tracking.TAG_BEST) != winner.run:  # what became of another trial's model is not told of this one
        for name in (tracking.TAG_VERSION, tracking.TAG_VERDICT):
            if name in before:
                mlflow.delete_tag(parent, name)
    tags = {tracking.TAG_BEST: winner.run, "dropforge.best_trial": str(winner.number)}
    now = int(time.time() * 1000)
    mlflow.log_batch(
        parent,
        metrics=[Metric(metric, winner.value, now, winner.steps or 0)],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )
    mlflow.log_text(parent, text + "\n", "trials.md")


def tell_candidate(tracking_uri: str, parent: str, mlflow_run: str) -> dict[str, str]:
    """Say on the sweep's MLflow run what became of its best trial: version and verdict."""
    mlflow = tracking.client(tracking_uri)
    tags = mlflow.get_run(mlflow_run).data.tags
    told: dict[str, str] = {name: tags[name] for name in (tracking.TAG_VERSION, tracking.TAG_VERDICT) if name in tags}
    for name, value in told.items():
        mlflow.set_tag(parent, name, value)
    return told


def curves(tracking_uri: str, runs: Mapping[int, str], metric: str) -> dict[int, Curve]:
    """What trials have measured so far, by number. :param runs: their MLflow runs.

    :raises Exception: as `Rest.call`, where there is no answer that helps.
    """
    found: dict[int, dict[int, float]] = {number: {} for number in runs}
    if not runs:
        return {}
    numbers = {run: number for number, run in runs.items()}
    query = urlencode({"run_ids": list(numbers), "metric_key": metric, "max_results": _POINTS}, doseq=True)
    for point in Rest(tracking_uri).call("GET", f"metrics/get-history-bulk-interval?{query}").get("metrics", []):
        value = real(point["value"])  # a resumed trial tells steps twice
        found[numbers[point["run_id"]]][int(point.get("step", 0))] = value if math.isfinite(value) else math.inf
    return dict(found)


def dumped(values: object) -> str:
    """A value as a parameter of MLflow."""
    return json.dumps(values, sort_keys=True)
