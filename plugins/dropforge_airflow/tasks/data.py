"""From the drop to a dataset version, and a last look at it before anything expensive begins."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, TypedDict

from airflow.sdk.exceptions import AirflowFailException

from dropforge import dataset, layout, ledger
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe
from dropforge.settings import from_env
from dropforge.store import Store
from dropforge_airflow import connection
from dropforge_airflow.tasks.failure import no_retry

if TYPE_CHECKING:
    from dropforge_airflow.tasks.plan import Plan

log = logging.getLogger(__name__)


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
    workdir = settings.state / "curation" / f"{planned['drop_id']}-{planned['counter']}"
    try:
        with no_retry():
            drop = ledger.read(store, planned["family"], planned["drop_id"])
            recipe = build_recipe(planned["recipe"])
            made = make(store, drop, recipe, workdir=workdir, progress=Lines(log.info), say=log.info)
    except AirflowFailException:
        shutil.rmtree(workdir, ignore_errors=True)
        raise
    shutil.rmtree(workdir, ignore_errors=True)
    card = made.files.get("card_html", "")
    for reason, number in sorted(made.counts.items()):
        log.info("%s: %d rows", reason, number)
    return Curated(
        digest=made.digest,
        manifest=f"{settings.root}/{layout.manifest_key(made.family, made.digest)}",
        card=f"{settings.root}/{card}" if card else "",
        rows={split: made.rows(split) for split in dataset.SPLITS},
    )


def check_data(planned: Plan, curated: Curated) -> dict[str, str]:
    """The task: the manifest must be whole, pass every rule of the gate, and its shards must be there."""
    settings = from_env()
    with no_retry():
        store = connection.open_store(settings.bucket)
        return check(store, planned["family"], curated["digest"], build_recipe(planned["recipe"]))


def check(store: Store, family: str, digest: str, recipe: Recipe) -> dict[str, str]:
    """What each rule found. :raises DataError: for a dataset version that cannot be trained on."""
    from curation import check as gate
    from curation.gate import overruled

    name = f"dataset {family}/{digest[:12]}"
    manifest = dataset.Manifest.from_json(store.get(layout.manifest_key(family, digest)))
    if manifest.digest != digest:
        raise DataError(name, f"its manifest says {manifest.digest[:12]}", "Curate the drop again")
    passed = gate(manifest, recipe)
    for shard in manifest.shards:
        found = store.stat(shard.key)
        if found is None or found.size != shard.bytes:
            cause = f"shard {shard.key} is missing" if found is None else f"shard {shard.key} has {found.size} bytes"
            raise DataError(name, cause, "Curate the drop again")
    for rule in passed:
        log.info("%s: %s (wanted: %s)", rule.name, rule.found, rule.wanted)
    told = {rule.name: rule.found for rule in passed}
    if failed := overruled(passed):
        log.warning("%s did not pass, and the recipe lets it: %s", ", ".join(failed), recipe.curation.gate.override)
        told["override"] = f"{', '.join(failed)}: {recipe.curation.gate.override}"
    return told
