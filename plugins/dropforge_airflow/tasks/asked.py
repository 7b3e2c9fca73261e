"""What people ask to be done with a checkpoint in MLflow: taken, done by a job each, and answered there."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypedDict

from dropforge import layout, mlflow_pages
from dropforge.json_objects import read_object
from dropforge.readable import check_reads, readable
from dropforge.run_limits import run_limits
from dropforge.settings import from_env
from dropforge.text import as_line
from dropforge_airflow import connection, lineage
from dropforge_airflow.job_manifests import kind_for, manifest
from dropforge_airflow.lineage import Lineage

if TYPE_CHECKING:
    from dropforge.checkpoints import Ask, Checkpoint
    from dropforge.recipe import Recipe
    from dropforge.rest import Rest
    from dropforge.run import RunSpec
    from dropforge.settings import Settings
    from dropforge.store import Store

log = logging.getLogger(__name__)

_LONGEST: Final = 4000  # characters of an answer
_AT_ONCE: Final = 4  # asks of one DAG run; the others wait for the next


class Taken(TypedDict):
    """An ask that was taken: what it says, its folder, and the job that does it."""

    ask: dict[str, str]
    checkpoint: dict[str, Any]
    verb: str
    folder: str
    job: dict[str, Any]


def take(run_id: str | None = None, ti: Any = None) -> list[Taken]:
    """The task: read what is asked for, answer what cannot be done, and make a job of the rest.

    Asks of runs that are not in our bucket are left alone: another installation may share the MLflow.
    """
    from dropforge import checkpoints
    from dropforge.errors import DropforgeError
    from dropforge.rest import STRANGE, DeniedError, RefusedError, Rest

    settings = from_env()
    rest, store = Rest(settings.tracking_uri), connection.open_store(settings.bucket)
    by = f"{ti.dag_id if ti else 'dropforge_checkpoints'} {run_id}"
    taken: list[Taken] = []
    for ask in checkpoints.asks(rest):
        if len(taken) == _AT_ONCE:
            break
        try:
            if (made := _take(rest, store, settings, ask, by)) is not None:
                taken.append(made)
        except (checkpoints.BadAskError, DropforgeError, DeniedError, RefusedError, *STRANGE) as error:
            log.warning("%r on %s: %r", ask.text, ask.model or ask.mlflow_run, error)
            try:
                checkpoints.answer(rest, ask, _not_done(error))
            except (DeniedError, RefusedError) as deaf:  # its run was deleted, or is not ours to edit: the others go on
                log.warning("and it cannot be answered: %s", deaf)
    log.info("%d asked for and taken", len(taken))
    return taken


def _take(rest: Rest, store: Store, settings: Settings, ask: Ask, by: str) -> Taken | None:
    from dataclasses import asdict

    from dropforge import checkpoints
    from dropforge.job import asked_job, queue_timeout
    from dropforge.recipes.load import build_recipe

    if not ask.mlflow_run:
        raise checkpoints.BadAskError("it is no checkpoint of a run")
    row = rest.call("GET", f"runs/get?run_id={ask.mlflow_run}")["run"]
    run = row["info"]
    if not checkpoints.is_ours(row, store):
        log.info("%r on %s is left alone: its run is not in %s", ask.text, ask.model or ask.mlflow_run, settings.root)
        return None
    earlier = checkpoints.started_by(ask)
    if earlier not in ("", by):
        # Only one DAG run at a time takes asks, so that one is over.
        raise checkpoints.BadAskError(f"{earlier} began it and ended without an answer. Ask again for another try")
    order = checkpoints.read(ask, checkpoints.checkpoints(rest, run["experiment_id"], ask.mlflow_run))
    item = order.checkpoint
    spec = checkpoints.check(order, row, store, settings.root)
    recipe = build_recipe(spec.recipe)
    _hold(spec, recipe, store, settings.bucket)
    nonce = hashlib.sha256(f"{by} {item.digest} {order.verb} {ask.model}".encode()).hexdigest()[:8]
    folder = layout.asked_prefix(item.run, item.step, order.verb, nonce)
    body = {
        "run": f"{spec.root}/run.json",
        "step": item.step,
        "digest": item.digest,
        "verb": "evaluate" if order.verb == "evaluate" else "export",
        "to": _exported_to(settings, item),
    }
    store.put(f"{folder}order.json", json.dumps(body, indent=1).encode())
    purpose = f"{order.verb}-step-{item.step}-{nonce}"
    job = asked_job(spec, recipe, purpose, f"{settings.root}/{folder}order.json")
    url = f"{mlflow_pages.server(settings.tracking_uri)}/#/experiments/{run['experiment_id']}/models/{item.model}"
    checkpoints.start(rest, ask, by)
    log.info("%s step-%d of %s", order.verb, item.step, item.run)
    return Taken(
        ask=asdict(ask),
        checkpoint=asdict(item),
        verb=order.verb,
        folder=folder,
        job={
            "manifest": manifest(job, kind_for(recipe.compute)),
            "backend": recipe.compute.backend,
            "mlflow_url": url,
            "queue_timeout": queue_timeout(recipe.compute),
        },
    )


def _hold(spec: RunSpec, recipe: Recipe, store: Store, bucket: str) -> None:
    """Hold a run's recipe to what the installation allows now; of its gang the job that is asked for is one pod.

    :raises RecipeError: naming the keys that ask for more.
    """
    one = recipe.compute.model_copy(update={"nodes": 1, "retries": 0})
    run_limits().check_recipe(recipe.model_copy(update={"compute": one}))
    check_reads(store, bucket, spec.family, recipe, readable())


def _exported_to(settings: Settings, item: Checkpoint) -> str:
    """The address of the folder that gets a checkpoint's model."""
    return f"{settings.root}/{layout.export_prefix(item.run, item.step, item.digest)}".rstrip("/")


def _not_done(error: Exception) -> str:
    """What to answer; of what pods wrote in another shape, or tags of others, that they cannot be read."""
    from dropforge.errors import DropforgeError
    from dropforge.rest import STRANGE

    strange = isinstance(error, STRANGE) and not isinstance(error, DropforgeError)
    text = f"not done: what is kept of it cannot be read ({error!r})" if strange else f"not done: {error}"
    return as_line(text, _LONGEST)


def job_of(taken: Taken) -> dict[str, Any]:
    """The operator's arguments for the job."""
    return taken["job"]


def answer(taken: list[Taken] | None, run_id: str | None = None) -> list[str]:
    """The task: write what came of each into MLflow, with its figures or its version.

    :raises AirflowFailException: if the asks could not be taken: as the DAG's last task it decides how that ended.
    """
    from airflow.sdk.exceptions import AirflowFailException

    from dropforge import checkpoints
    from dropforge.errors import DropforgeError
    from dropforge.rest import STRANGE, DeniedError, RefusedError, Rest

    if taken is None:
        raise AirflowFailException("What is asked for could not be taken; the log of the task `take` says why")
    settings = from_env()
    rest, store = Rest(settings.tracking_uri), connection.open_store(settings.bucket)
    told = []
    for item in taken:
        ask, checkpoint = checkpoints.Ask(**item["ask"]), checkpoints.Checkpoint(**item["checkpoint"])
        try:
            try:
                made = _outcome(rest, store, settings, item["verb"], item["folder"], checkpoint, run_id)
                text = as_line(made, _LONGEST)  # it holds words of the job
            except (DropforgeError, *STRANGE) as error:
                text = _not_done(error)
            checkpoints.answer(rest, ask, text, checkpoint)
        except (DeniedError, RefusedError) as error:  # its run was deleted, or is not ours to edit: the others go on
            text = f"not answered: {error}"
        log.info("%s: %s", ask.text, text)
        told.append(text)
    return told


def _outcome(
    rest: Rest, store: Store, settings: Settings, verb: str, folder: str, checkpoint: Checkpoint, run_id: str | None
) -> str:
    from dropforge import checkpoints, tracking
    from dropforge.store import MissingObjectError

    try:
        result = read_object(store, f"{folder}result.json")
    except MissingObjectError:
        return f"not done: its job ended without a word; see DAG run {run_id} in Airflow"
    if "error" in result:
        return f"not done: {result['error']}"
    if verb == "evaluate":
        figures = {
            key: value
            for key, value in result["figures"].items()
            if key.startswith(("eval/", "gen/")) and isinstance(value, int | float)
        }
        _log_figures(rest, checkpoint, figures)
        return f"{_shown(figures)} on {result['figures'].get('rows', '?')} rows"
    # Where the model lies is Airflow's word: pods write the result.
    uri, model = _exported_to(settings, checkpoint), result["model"]
    if verb == "export":
        return f"{uri}, {model['bytes'] / 1e6:.1f} MB"
    row = rest.call("GET", f"runs/get?run_id={checkpoint.mlflow_run}")["run"]
    spec, model = checkpoints.read_spec(row, store, settings.root), {**model, "uri": uri}
    version = tracking.register_checkpoint(
        settings.tracking_uri, spec, model, checkpoint.step, checkpoint.digest, checkpoint.model
    )
    made = lineage.version(settings.tracking_uri, spec.family, version)
    lineage.tell(lambda: Lineage([lineage.at(uri)], [made]))
    return f"version {version} of {spec.family}, {uri}"


def _log_figures(rest: Rest, checkpoint: Checkpoint, figures: Mapping[str, Any]) -> None:
    """As metrics of the logged model, under names of their own: the run's curves are the training's."""
    import time

    now = int(time.time() * 1000)
    rows = [
        {
            "key": f"checkpoint_eval/{name.removeprefix('eval/')}",
            "value": float(value),
            "timestamp": now,
            "step": checkpoint.step,
            "model_id": checkpoint.model,
        }
        for name, value in figures.items()
    ]
    rest.call("POST", "runs/log-batch", {"run_id": checkpoint.mlflow_run, "metrics": rows})


def _shown(figures: Mapping[str, Any]) -> str:
    names = [name for name in ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/macro_f1") if name in figures]
    names += sorted(name for name in figures if name.startswith("gen/"))
    return ", ".join(f"{name.removeprefix('eval/')} {float(figures[name]):.4f}" for name in names)
