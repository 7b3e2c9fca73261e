"""A family as MLflow has it: its versions, who is champion, and its newest runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from dropforge import sweep_tracking, tracking
from dropforge.errors import DropforgeError
from dropforge.rest import MissingError, Rest, real, speaks_rest

SHOWN: Final = 30  # versions, and
RUNS: Final = 100  # runs, the newest


@dataclass(frozen=True)
class Version:
    """
    :param made: seconds since 1970. :param aliases: that point to it now.
    :param rolled_back: who rolled it back, from any alias, when and why; empty if nobody did.
    """

    number: str
    made: float
    run_id: str
    run: str
    aliases: tuple[str, ...]
    verdict: str
    previous: str
    rolled_back: str
    checkpoint: bool


@dataclass(frozen=True)
class FamilyRun:
    """A run of the family in MLflow."""

    run_id: str
    run: str
    dag_run: str
    status: str
    began: float
    version: str
    verdict: str
    loss: float | None


@dataclass(frozen=True)
class Registry:
    """:param experiment: id of the family's experiment; empty if it has none."""

    experiment: str
    versions: tuple[Version, ...]
    runs: tuple[FamilyRun, ...]


def read(uri: str, family: str) -> Registry:
    """:raises DropforgeError: if MLflow speaks no REST. :raises Exception: as `Rest.call`."""
    if not speaks_rest(uri):
        raise DropforgeError("MLflow", "the pages read it by http only", "Set MLFLOW_TRACKING_URI to a server")
    rest = Rest(uri)
    experiment = _experiment(rest, family)
    return Registry(experiment, _versions(rest, family), _runs(rest, experiment) if experiment else ())


def _experiment(rest: Rest, family: str) -> str:
    try:
        found = rest.call("GET", f"experiments/get-by-name?{urlencode({'experiment_name': family})}")
    except MissingError:
        return ""
    return str(found["experiment"]["experiment_id"])


def _versions(rest: Rest, family: str) -> tuple[Version, ...]:
    wanted = urlencode({"filter": f"name='{family}'"})  # one that is not there may be denied, and is not found
    models = rest.call("GET", f"registered-models/search?{wanted}").get("registered_models")
    if not models:
        return ()
    (model,) = models
    aliases: dict[str, list[str]] = {}
    for item in model.get("aliases", []):
        aliases.setdefault(str(item["version"]), []).append(str(item["alias"]))
    query = {"filter": f"name='{family}'", "max_results": SHOWN, "order_by": "version_number DESC"}
    found = rest.call("GET", f"model-versions/search?{urlencode(query)}").get("model_versions", [])
    shown = {str(item["version"]): item for item in found}
    for number in aliases:  # the champion is shown, however old it is
        if number not in shown:
            query = {"name": family, "version": number}
            shown[number] = rest.call("GET", f"model-versions/get?{urlencode(query)}")["model_version"]
    return tuple(_version(item, aliases) for item in shown.values())


def _version(item: Mapping[str, Any], aliases: Mapping[str, list[str]]) -> Version:
    tags = _tags(item)
    number = str(item["version"])
    return Version(
        number=number,
        made=float(item.get("creation_timestamp") or 0) / 1000,
        run_id=str(item.get("run_id") or ""),
        run=tags.get(tracking.TAG_RUN, ""),
        aliases=tuple(sorted(aliases.get(number, []))),
        verdict=tags.get(tracking.TAG_VERDICT, ""),
        previous=tags.get(tracking.TAG_PREVIOUS, ""),
        rolled_back=next((told for tag, told in tags.items() if tag.startswith(tracking.TAG_ROLLED_BACK)), ""),
        checkpoint=tracking.TAG_CHECKPOINT in tags,
    )


def _runs(rest: Rest, experiment: str) -> tuple[FamilyRun, ...]:
    """A sweep is one, and of its trials the one that became a candidate; MLflow's pages have the others below it."""
    body = {"experiment_ids": [experiment], "max_results": RUNS, "order_by": ["attributes.start_time DESC"]}
    found: list[FamilyRun] = []
    for wanted in (sweep_tracking.NO_TRIAL, sweep_tracking.CANDIDATE):
        found += map(_run, rest.call("POST", "runs/search", {**body, "filter": wanted}).get("runs", []))
    return tuple(sorted(found, key=lambda run: run.began, reverse=True)[:RUNS])


def _run(item: Mapping[str, Any]) -> FamilyRun:
    tags, info = _tags(item["data"]), item["info"]
    losses = [metric["value"] for metric in item["data"].get("metrics", []) if metric["key"] == "eval/loss"]
    return FamilyRun(
        run_id=str(info["run_id"]),
        run=tags.get(tracking.TAG_RUN) or tags.get(tracking.TAG_SWEEP, ""),
        # A sweep's is of another DAG, which these pages show nothing of.
        dag_run="" if tracking.TAG_SWEEP in tags else tags.get(tracking.TAG_DAG_RUN, ""),
        status=str(info["status"]),
        began=float(info.get("start_time") or 0) / 1000,
        version=tags.get(tracking.TAG_VERSION, ""),
        verdict=tags.get(tracking.TAG_VERDICT, ""),
        loss=real(losses[-1]) if losses else None,
    )


def _tags(holder: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag["key"]): str(tag.get("value", "")) for tag in holder.get("tags", [])}
