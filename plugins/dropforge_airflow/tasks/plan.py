"""Which drop, with which recipe, and whether this run may have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from airflow.sdk.exceptions import AirflowSkipException
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.local.capacity import NEVER_FITS_MEND, Resources
from kubeflow_training.jobs.local.layout import HOME_VARIABLE

from dropforge import family_recipe, intake_ledger, layout, ledger, sweeps
from dropforge.base_config import check_folder_there, from_bucket
from dropforge.code import look_at, told
from dropforge.data_names import SYNTAX
from dropforge.drop import Drop, is_id, parse_partition_key, read_drop
from dropforge.errors import DataError, RecipeError
from dropforge.estimate import check_length, check_memory, estimate, size_text, unknown_memory
from dropforge.holdout import find_holdout
from dropforge.hub import UnreachableError, at_config, pin_base
from dropforge.job import check_requested_disk
from dropforge.readable import check_reads
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe, merge, preset_values, resolve
from dropforge.recipes.self_service_rules import at_path
from dropforge.registered_name import check_names
from dropforge.run_limits import RunLimits
from dropforge.settings import from_env
from dropforge.sources import check_uploaded, pin
from dropforge.spark import find_spark
from dropforge.stages import NOTHING_NEW
from dropforge.start import FindChampion, settle
from dropforge.store import MissingObjectError, Store
from dropforge_airflow import connection
from dropforge_airflow.filled import Filled, filled
from dropforge_airflow.tasks.batches import divided
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.recipe import Installation, find_ruling, resolve_recipe

if TYPE_CHECKING:
    from airflow.sdk.types import DagRunProtocol

log = logging.getLogger(__name__)


class Plan(TypedDict):
    """What the later tasks need to know, all of it small.

    :param prefix: where the drop's files lie: a prefix of the bucket, or an address elsewhere.
    :param start: where the weights begin (`dropforge.run.Start`); None if with the base of the recipe.
    :param parts: names and ids of the uploads, if several are read as one.
    :param retrain: why the calendar started the run, if it did. :param sweep: whose trial the run is, if it is one.
    :param again: whether the data are trained on although they were before.
    :param date: the day on which the drop was claimed, which tries, clears and trials share.
    """

    family: str
    drop: str
    drop_id: str
    counter: int
    prefix: str
    recipe: dict[str, Any]
    start: dict[str, Any] | None
    parts: NotRequired[list[dict[str, str]]]
    retrain: NotRequired[dict[str, Any] | None]
    sweep: NotRequired[sweeps.Member | None]
    date: NotRequired[str]
    again: NotRequired[bool]


def plan(
    families: str,
    params: Mapping[str, Any] | None = None,
    partition_key: str | None = None,
    run_id: str | None = None,
    dag_run: DagRunProtocol | None = None,
    ti: Any = None,
) -> Plan:
    """The task: choose the drop, claim it, resolve the recipe. :param families: folder of the families' files."""
    assert params is not None
    assert run_id is not None
    assert dag_run is not None
    from dropforge import tracking

    settings = from_env()
    with no_retry():
        if dag_run.run_type != "operator_triggered":
            refuse_foreign_origin(params)
        try:
            return make_plan(
                connection.open_store(settings.bucket),
                settings.bucket,
                params,
                partition_key=partition_key,
                owner=run_id,
                find_champion=partial(tracking.champion, settings.tracking_uri),
                check_name=partial(check_names, settings.tracking_uri),
                installation=Installation.here(Path(families)),
            )
        except AirflowSkipException as nothing:
            ti.xcom_push(key=NOTHING_NEW, value={"told": str(nothing)})  # for `watcher`
            raise


def make_plan(
    store: Store,
    bucket: str,
    params: Mapping[str, Any],
    *,
    partition_key: str | None,
    owner: str,
    find_champion: FindChampion = lambda *_: None,
    check_name: Callable[[str], None] = lambda _: None,
    installation: Installation = Installation(),  # noqa: B008 - frozen
) -> Plan:
    """Choose, claim and resolve.

    :param partition_key: of the drop's event; None for runs that were started by hand.
    :param owner: the run's id in Airflow; asking twice gives the same plan.
    :param find_champion: looks the family's champion up.
    :param check_name: refuses a family whose name is somebody else's in MLflow.
    :raises AirflowSkipException: if another run has the drop.
    :raises DropforgeError: for a drop that is not there and a recipe that cannot work.
    """
    asked = filled(params, bucket)
    sourced = None
    if partition_key is not None:
        named = parse_partition_key(partition_key)
        drop = ledger.read(store, named["family"], named["id"])
    else:
        sourced = find_source(store, bucket, asked, installation)
        drop = sourced or find_drop(store, bucket, asked.drop, asked.family)
    sweep, by_calendar = sweeps.member(params.get("sweep")), _retrain(params.get("retrain"))
    if sweep is not None:
        owner = sweeps.candidate_run(sweep["by"])  # all trials share the claim, so that the best need not train again
    taken = ledger.claim(store, drop.family, drop.id, owner, again=bool(params.get("again")))
    if taken is None:
        holder = ledger.taken_by(store, drop.family, drop.id)
        raise AirflowSkipException(
            f"Drop {drop.family}/{drop.drop} {holder}. Tick `again` in the form to train on it all the same"
        )
    # After the claim: a recipe that cannot work ends this run, and the nudge need not start it again and again.
    gathered = intake_ledger.batch_recipe(store, drop.family, drop.id) if partition_key and drop.parts else None
    recipe, first = resolve_recipe(store, drop, asked, installation, gathered, by_calendar=by_calendar is not None)
    if sourced is None and drop.uploaded:
        check_uploaded(recipe, f"drop {drop.family}/{drop.drop}")
    if recipe.curation.engine == "spark" and recipe.curation.spark.cluster is None:
        log.info("Curation will run on %s", find_spark())
    check_name(drop.family)
    check_reads(store, bucket, drop.family, recipe, installation.reads)
    if recipe.evaluate.holdout is not None:
        find_holdout(store, recipe.evaluate.holdout)
    with divided(store, drop.family, drop.id, taken.counter):
        check_amounts(drop, recipe, installation.limits)
    check_folder_there(recipe, installation.reads.folders)
    with from_bucket(recipe, store, bucket) as sized:
        known = weigh(sized)
    if recipe.code is not None:
        log.info("Own code: %s", told(recipe, look_at(recipe, store)))
    recipe, start = settle(recipe, store, drop.family, find_champion)
    if start is not None:
        log.info("The weights begin with %s", start)
    # A branch of the hub moves: from here on the run knows the commit only.
    pinned, line = pin_base(recipe.plain())
    recipe = build_recipe(pinned)
    if line:
        log.info("%s", line)
        if not known:
            weigh_by_config(recipe)
    if first is not None:
        if not family_recipe.keep_first(store, drop.family, first):
            log.info("Another drop has set the recipe of family %s meanwhile: planning again", drop.family)
            return make_plan(
                store,
                bucket,
                params,
                partition_key=partition_key,
                owner=owner,
                find_champion=find_champion,
                check_name=check_name,
                installation=installation,
            )
        log.info("The recipe of this drop is that of family %s from now on", drop.family)
    log.info("Drop %s/%s (id %s), claim %d", drop.family, drop.drop, drop.id, taken.counter)
    return Plan(
        family=drop.family,
        drop=drop.drop,
        drop_id=drop.id,
        counter=taken.counter,
        prefix=drop.prefix,
        recipe=recipe.plain(),
        start=None if start is None else asdict(start),
        parts=[part.model_dump() for part in drop.parts],
        retrain=by_calendar,
        sweep=sweep,
        date=taken.at[:10],
        again=bool(params.get("again")),
    )


def refuse_foreign_origin(params: Mapping[str, Any]) -> None:
    """Refuse what says that a sweep or the calendar started a run which no task did: its figures would count for them.

    :raises DataError: naming the key.
    """
    for key, mend in (
        ("sweep", "Start sweeps with `dropforge sweep`"),
        ("retrain", "Leave it out, or start the calendar's DAG"),
    ):
        if params.get(key):
            raise DataError(f"configuration key `{key}`", "only a task of Dropforge may set it", mend)


def _retrain(values: Any) -> dict[str, Any] | None:
    """What a run's configuration says of the calendar that started it; None for a run that it did not start."""
    if values and not isinstance(values, dict):
        raise DataError(
            "configuration key `retrain`",
            "it was not written by the calendar",
            "Leave it out, or start the calendar's DAG",
        )
    return values or None


def check_amounts(drop: Drop, recipe: Recipe, limits: RunLimits) -> None:
    """:raises RecipeError, DataError: for more than the installation lets a run have, or than this machine ever has."""
    limits.check_recipe(recipe)
    limits.check_bytes(f"drop {drop.family}/{drop.drop}", drop.total_bytes)
    compute, home = recipe.compute, os.environ.get(HOME_VARIABLE)
    if compute.backend != "local" or not home:
        return
    if why := LocalCluster(home).never_fits(Resources(*compute.all_pods)):
        raise RecipeError("recipe section `compute`", why, NEVER_FITS_MEND)


def weigh(recipe: Recipe) -> bool:
    """Tell what a rank will take, and whether that is known.

    :raises RecipeError: if it clearly does not fit, or rows are longer than the model takes.
    """
    check_length(recipe)
    figures = estimate(recipe)
    check_memory(recipe, figures)
    check_requested_disk(recipe)
    about = f"about {size_text(figures.rank_bytes)}" if figures.rank_bytes else ""
    log.info("Memory of a rank: %s", " ".join(filter(None, (about, unknown_memory(recipe, figures)))))
    return figures.memory is not None


def weigh_by_config(recipe: Recipe) -> None:
    """The same for a base of the hub whose sizes are not shipped: its config is small, and known once it is pinned."""
    try:
        measured = build_recipe(at_config(recipe.plain()))
    except UnreachableError as error:  # also where nothing can be written; the pods have a cache of their own
        log.info("Memory of a rank stays unknown: %s", error)
        return
    weigh(measured)


def find_source(store: Store, bucket: str, asked: Filled, installation: Installation) -> Drop | None:
    """The data that the form or the recipe of a run without a drop names, entered into the ledger; None if none.

    :raises DataError: if the data are not there, or no family is given.
    """
    if asked.drop:
        return None
    if asked.preset:
        under = resolve({"extends": asked.preset})
    elif asked.family:
        under = find_ruling(store, asked.family, installation).values
    else:
        under = preset_values(installation.preset)
    values = merge(under, asked.over)
    if at_path(values, "data.source") is None:
        return None
    recipe = build_recipe(values)
    source = recipe.data.source
    if source is None:
        return None
    if not asked.family:
        raise DataError("form field `family`", "it is empty, and the data name none", "Name the family to train")
    check_reads(store, bucket, asked.family, recipe, installation.reads)
    drop = pin(store, source, asked.family, bucket)
    log.info("Source of %d files is drop id %s; `data.source.id` pins it", len(drop.files), drop.id)
    return ledger.place(store, drop)


def find_drop(store: Store, bucket: str, asked: str | None, family: str | None) -> Drop:
    """The drop that a person means: `FAMILY/DROP`, `DROP` of a given family, or an id in the ledger.

    A drop that lies in the bucket but was never announced is entered into the ledger.

    :raises DataError: if there is no such drop, or it is not complete.
    """
    asked, family = (asked or "").strip(), (family or "").strip() or None
    if not asked:
        cause = "it is empty, no drop started this run, and the recipe has no `data.source`"
        raise DataError("form field `data`", cause, f"Write {SYNTAX}")
    if is_id(asked):
        return _by_id(store, asked, family)
    head, slash, name = asked.removeprefix(layout.DROPS).strip("/").partition("/")
    if not slash:
        if family is None:
            raise DataError(f"drop {asked!r}", "its family is not given", "Give the drop as `FAMILY/DROP`")
        head, name = family, head
    if family is not None and head != family:
        raise DataError(f"drop {asked!r}", f"it is not of family {family!r}", "Leave `family` empty")
    drop = read_drop(store, layout.check_family(head), layout.check_drop(name), bucket)
    entry = ledger.record(store, drop) or ledger.find(store, drop)
    return drop if entry is None else drop.model_copy(update={"id": entry.id})


def _by_id(store: Store, drop_id: str, family: str | None) -> Drop:
    if family is not None:
        try:
            return ledger.read(store, layout.check_family(family), drop_id)
        except MissingObjectError:
            raise DataError(
                f"drop id {drop_id}", f"family {family} has no such drop", "Look under ledger/drops/"
            ) from None
    for info in store.list("ledger/drops/"):
        if info.key.endswith(f"/{drop_id}.json"):
            return ledger.read_entry(store, info.key)
    raise DataError(f"drop id {drop_id}", "the ledger has no such drop", "Look under ledger/drops/ in the bucket")
