"""From the drop to a dataset version, and a last look at it before anything expensive begins."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any, Final, TypedDict

from airflow.sdk.exceptions import AirflowFailException

from dropforge import dataset, layout, ledger
from dropforge.errors import DataError
from dropforge.json_objects import read_as
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe
from dropforge.run_limits import run_limits
from dropforge.settings import Settings, from_env
from dropforge.store import Store
from dropforge.text import as_line, escape
from dropforge_airflow import connection, lineage
from dropforge_airflow.tasks.batches import divide, divided
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.foresee import foresee

if TYPE_CHECKING:
    from dropforge.curation_job import CurationJob
    from dropforge_airflow.tasks.plan import Plan

log = logging.getLogger(__name__)

_WARNINGS: Final = 100  # lines of the card that are logged
_LONGEST_WARNING: Final = 2_000  # characters
_RESULT: Final = 1 << 20  # bytes of what a job of curation leaves: a digest
FORECAST: Final = "forecast"  # XCom of `check_data`


class Curated(TypedDict):
    """A dataset version by its addresses."""

    digest: str
    manifest: str
    card: str
    rows: dict[str, int]


def curate(planned: Plan) -> Curated:
    """The task: make the dataset version of the drop, or find that it is there already."""
    from curation import curate as make
    from curation.pace import Lines

    settings = from_env()
    store = connection.open_store(settings.bucket)
    # The same folder for every try, so that the next one goes on where the last one was cut off.
    workdir = settings.state / "curation" / workplace(planned)
    try:
        with no_retry(), divided(store, planned["family"], planned["drop_id"], planned["counter"]):
            drop = ledger.read(store, planned["family"], planned["drop_id"])
            recipe = here(build_recipe(planned["recipe"]))
            made = make(store, drop, recipe, workdir=workdir, progress=Lines(log.info), say=log.info)
    except AirflowFailException:
        shutil.rmtree(workdir, ignore_errors=True)
        raise
    shutil.rmtree(workdir, ignore_errors=True)
    _prove(store, planned)
    return _told(settings, store, made)


def workplace(planned: Plan) -> str:
    """Name of a curation's folder: trials of a sweep share their claim, and may curate side by side."""
    name, sweep = f"{planned['family']}-{planned['drop_id']}-{planned['counter']}", planned.get("sweep")
    return f"{name}-trial-{sweep['trial']}" if sweep else name


def cluster_job(planned: Plan) -> dict[str, Any] | None:
    """The job that curates the drop on Kubernetes, its file written; None where the recipe asks for none."""
    from curation.engines.choice import choose
    from dropforge.curation_job import manifest

    settings = from_env()
    with no_retry():
        recipe = build_recipe(planned["recipe"])
        cluster = recipe.curation.spark.cluster
        if cluster is None or recipe.curation.engine == "embedded":
            return None
        store = connection.open_store(settings.bucket)
        drop = ledger.read(store, planned["family"], planned["drop_id"])
        pods = f"{cluster.executors} executors in namespace {cluster.namespace}"
        planned_bytes = sum(file.size for file in drop.data_files)
        choice = choose(recipe.curation, planned_bytes, lambda: pods, cluster.executors * cluster.cores)
        if choice.engine == "embedded":
            return None  # `curate` says so
        log.info("Curation engine %s: %s", choice.engine, choice.why)
        job, prefix = _job(planned, recipe)
        store.put(f"{prefix}job.json", job.to_json())
        return manifest(job, f"{settings.root}/{prefix}job.json", cluster)


def here(recipe: Recipe) -> Recipe:
    """A recipe for this machine: where pods can be had, what is not for them is not for a Spark beside Airflow."""
    curation = recipe.curation
    if curation.engine != "auto" or curation.spark.cluster is None:
        return recipe
    return recipe.model_copy(update={"curation": curation.model_copy(update={"engine": "embedded"})})


def from_cluster(planned: Plan) -> Curated:
    """The dataset version that the job has made. :raises AirflowFailException: if it left none."""
    settings = from_env()
    with no_retry():
        job, _ = _job(planned, build_recipe(planned["recipe"]))
        store = connection.open_store(settings.bucket)
        digest = read_as(store, job.result, lambda result: str(result["digest"]), most=_RESULT)
        manifest = dataset.read_manifest(store, layout.manifest_key(planned["family"], digest))
    _prove(store, planned)
    return _told(settings, store, manifest)


def refused_on_cluster(planned: Plan, refusal: str) -> None:
    """Divide the batch whose data the job has refused. :param refusal: what it said."""
    store = connection.open_store(from_env().bucket)
    divide(store, planned["family"], planned["drop_id"], planned["counter"], refusal)


def _job(planned: Plan, recipe: Recipe) -> tuple[CurationJob, str]:
    from dropforge.curation_job import job_of

    cluster = recipe.curation.spark.cluster
    assert cluster is not None
    return job_of(planned["family"], planned["drop_id"], planned["counter"], planned["recipe"], cluster)


def _prove(store: Store, planned: Plan) -> None:
    ledger.prove(store, planned["family"], [planned["drop_id"], *(part["id"] for part in planned.get("parts", ()))])


def _told(settings: Settings, store: Store, made: dataset.Manifest) -> Curated:
    lineage.tell(lambda: lineage.curated(settings.root, made))
    card = made.files.get("card_html", "")
    told = dataset.read_card(store, made).get("warnings")
    warnings = told if isinstance(told, list) else []
    for warning in warnings[:_WARNINGS]:
        log.warning("%s", as_line(warning, _LONGEST_WARNING))
    if len(warnings) > _WARNINGS:
        log.warning("%d more on the card", len(warnings) - _WARNINGS)
    for reason, number in sorted(made.counts.items()):
        log.info("%s: %d rows", reason, number)
    return Curated(
        digest=made.digest,
        manifest=f"{settings.root}/{layout.manifest_key(made.family, made.digest)}",
        card=f"{settings.root}/{card}" if card else "",
        rows={split: made.rows(split) for split in dataset.SPLITS},
    )


def check_data(planned: Plan, curated: Curated, ti: Any = None) -> dict[str, str]:
    """The task: the manifest must be whole, pass every rule of the gate, and its shards must be there.

    Then it is known what the run would take, which is left under the name `forecast`.
    """
    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry(), divided(store, planned["family"], planned["drop_id"], planned["counter"]):
        recipe = build_recipe(planned["recipe"])
        found = check(store, planned["family"], curated["digest"], recipe)
        manifest = dataset.read_manifest(store, layout.manifest_key(planned["family"], curated["digest"]))
        rows = manifest.rows("train") + manifest.rows("eval")
        run_limits().check_rows(f"dataset {planned['family']}/{curated['digest'][:12]}", rows)
        forecast = foresee(store, settings.tracking_uri, manifest, recipe)
    if ti is not None:
        ti.xcom_push(key=FORECAST, value=forecast.to_dict())
    return found


def check(store: Store, family: str, digest: str, recipe: Recipe) -> dict[str, str]:
    """What each rule found. :raises DataError: for a dataset version that cannot be trained on."""
    from curation import check as gate
    from curation.earlier import mark
    from curation.gate import overruled
    from curation.increments import aside

    name = f"dataset {family}/{digest[:12]}"
    manifest = dataset.read_manifest(store, layout.manifest_key(family, digest))
    if manifest.digest != digest:
        raise DataError(name, f"its manifest says {manifest.digest[:12]}", "Curate the drop again")
    passed = gate(manifest, recipe, aside=aside(store, manifest))
    for shard in manifest.shards:
        found = store.stat(shard.key)
        if found is None or found.size != shard.bytes:
            cause = f"shard {shard.key} is missing" if found is None else f"shard {shard.key} has {found.size} bytes"
            raise DataError(name, cause, "Curate the drop again")
    mark(store, manifest)
    for rule in passed:
        log.info("%s: %s (wanted: %s)", rule.name, rule.found, rule.wanted)
    told = {rule.name: escape(rule.found) for rule in passed}  # names of columns hold what no XCom does
    if failed := overruled(passed):
        log.warning("%s did not pass, and the recipe lets it: %s", ", ".join(failed), recipe.curation.gate.override)
        told["override"] = f"{', '.join(failed)}: {recipe.curation.gate.override}"
    return told
