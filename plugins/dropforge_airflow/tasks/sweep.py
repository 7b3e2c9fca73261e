"""A sweep's tasks: plan its trials, end those that fall behind, choose the best, and close what was opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from airflow.sdk.exceptions import AirflowFailException

from dropforge import ledger, sweep_tracking, sweeps
from dropforge.base_config import check_folder_there, from_bucket
from dropforge.drop import Drop, identity
from dropforge.errors import DataError
from dropforge.hub import pin_base
from dropforge.mlflow_pages import run_page
from dropforge.promotion import direction_of
from dropforge.readable import check_reads
from dropforge.recipe import Recipe
from dropforge.recipes.load import merge
from dropforge.rest import UNANSWERED
from dropforge.settings import from_env
from dropforge.sources import check_uploaded
from dropforge.stopping import behind
from dropforge.store import Store
from dropforge.sweep import EarlyStop, Sweep, build_sweep, check_trials
from dropforge.sweeps import Member, Stop
from dropforge_airflow import connection
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.dag_runs import state_of
from dropforge_airflow.filled import filled
from dropforge_airflow.job_manifests import kind_for
from dropforge_airflow.starting import GOING
from dropforge_airflow.tasks import plan as finetune
from dropforge_airflow.tasks import run as finetune_run
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.recipe import Installation, resolve_recipe
from dropforge_airflow.trials import TrialArguments
from dropforge_airflow.triggers.turns import ENDED

if TYPE_CHECKING:
    from airflow.sdk.bases.sensor import PokeReturnValue

log = logging.getLogger(__name__)

TRIAL = "trial"
# Tasks whose states say how the sweep ended; trials may fail or be stopped early.
_DECISIVE = ("plan", "best", "start", "candidate", "report")


class Planned(TypedDict):
    """What the later tasks need to know of a sweep.

    :param parent: its MLflow run. :param told: the trials' values, by number.
    """

    family: str
    by: str
    parent: str
    parent_url: str
    metric: str
    trials: list[TrialArguments]
    backend: str
    kind: str
    namespace: str
    early_stop: dict[str, Any] | None


class Chosen(TypedDict):
    """The best trial: the run that makes it the candidate, with its configuration."""

    number: int
    run: str
    conf: dict[str, Any]
    note: str


def plan(params: Mapping[str, Any] | None = None, run_id: str | None = None, ti: Any = None) -> list[TrialArguments]:
    """The task: check every trial, claim the data, open the sweep's MLflow run. :returns: the trials, to be mapped."""
    assert params is not None
    assert run_id is not None
    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        sweep = build_sweep(params["sweep"] or {})
        drop, confs = settle(store, settings.bucket, sweep, params, run_id)
        recipes = check_recipes(store, settings.bucket, sweep, drop, confs)
        first = recipes[0]
        ledger.claim(store, drop.family, drop.id, sweeps.candidate_run(run_id), again=True)
    flat = {f"space.{key}": sweep_tracking.dumped(value) for key, value in sweep.plain()["space"].items()}
    known = {"trials": str(len(confs)), "seed": str(sweep.seed), "metric": first.promote.metric}
    tags = {"dropforge.drop": drop.id, "dropforge.sweep_digest": sweep.digest}
    parent, experiment = sweep_tracking.open_parent(settings.tracking_uri, drop.family, run_id, known | flat, tags)
    trials = []
    for trial, conf in zip(sweep.made(), confs, strict=True):
        by = Member(by=run_id, parent=parent, trial=trial.number, candidate=False)
        trials.append(
            TrialArguments(
                run=sweeps.trial_run(run_id, trial.number),
                conf={**conf, "sweep": by},
                number=trial.number,
                told=trial.told,
                at_once=sweep.at_once,
                family=drop.family,
                by=run_id,
            )
        )
        log.info("Trial %d: %s", trial.number, trial.told)
    url = run_page(settings.tracking_uri, experiment, parent)
    log.info("%d trials, %d at once, the best by %s: %s", len(trials), sweep.at_once, first.promote.metric, url)
    ti.xcom_push(
        key="sweep",
        value=Planned(
            family=drop.family,
            by=run_id,
            parent=parent,
            parent_url=url,
            metric=first.promote.metric,
            trials=trials,
            backend=first.compute.backend,
            kind=kind_for(first.compute).name,
            namespace=first.compute.namespace,
            early_stop=None if sweep.early_stop is None else sweep.early_stop.model_dump(),
        ),
    )
    return trials


def settle(
    store: Store, bucket: str, sweep: Sweep, params: Mapping[str, Any], run_id: str
) -> tuple[Drop, list[dict[str, Any]]]:
    """The data that all trials share, and what the form would say for each; sources and commits are pinned in it.

    A source or a branch of the hub that moves while the sweep runs would give later trials other data, or another base.

    :raises RecipeError: naming a key whose model or data may not be read; nobody is asked for it.
    """
    family, named = (params.get("family") or "").strip() or None, (params.get("drop") or "").strip() or None
    trials = sweep.made()
    confs: list[dict[str, Any]] = [
        {"preset": sweep.preset, "family": family, "drop": named, "again": True, "overrides": sweep.overrides(trial)}
        for trial in trials
    ]
    installation = Installation.here()
    drop = finetune.find_source(store, bucket, filled(confs[0], bucket), installation)
    if drop is None and named is None:
        raise DataError("sweep", "it has no data", "Name a drop (`--drop FAMILY/DROP`), or `data.source` in its recipe")
    pinned = {"data": {"source": {"id": identity(drop.files)}}} if drop is not None else {}
    found = drop or finetune.find_drop(store, bucket, named, family)
    commits: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for conf in confs:
        conf["family"] = found.family
        if drop is None:
            conf["drop"] = found.id
        conf["overrides"] = merge(conf["overrides"], pinned)
        recipe = resolve_recipe(store, found, filled(conf, bucket), installation).recipe
        base = (recipe.base.model, recipe.base.revision)
        # Before the hub is asked, and while a branch or a proposal still has its name.
        check_reads(store, bucket, found.family, recipe, installation.reads)
        if base not in commits:  # asked once: a branch may move between two questions
            commits[base] = _commit(recipe)
        conf["overrides"] = merge(conf["overrides"], commits[base])
    log.info("Data of sweep %s: drop %s/%s (id %s)", run_id, found.family, found.drop, found.id)
    return found, confs


def check_recipes(store: Store, bucket: str, sweep: Sweep, drop: Drop, confs: list[dict[str, Any]]) -> list[Recipe]:
    """Each trial's recipe as its run will read it; what it names to be read `settle` has looked at.

    :raises DropforgeError: naming the trial that cannot work.
    """
    recipes, installation = [], Installation.here()
    for conf in confs:
        recipe = resolve_recipe(store, drop, filled(conf, bucket), installation).recipe
        if drop.uploaded:
            check_uploaded(recipe, f"drop {drop.family}/{drop.drop}")
        finetune.check_amounts(drop, recipe, installation.limits)
        check_folder_there(recipe, installation.reads.folders)
        with from_bucket(recipe, store, bucket) as sized:
            finetune.weigh(sized)
        recipes.append(recipe)
    check_trials(sweep, recipes)
    return recipes


def _commit(recipe: Recipe) -> dict[str, Any]:
    pinned, line = pin_base(recipe.plain())
    if line:
        log.info("%s", line)
    revision = pinned["base"].get("revision")
    return {"base": {"revision": revision}} if revision != recipe.base.revision else {}


def watch(planned: Planned, ti: Any = None, run_id: str | None = None) -> PokeReturnValue:
    """The sensor's look: end the trials that have fallen behind, until all have ended."""
    from airflow.sdk.bases.sensor import PokeReturnValue

    if planned["early_stop"] is None:
        log.info("The sweep has no `early_stop`: every trial trains to its end")
        return PokeReturnValue(is_done=True)
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[TRIAL], run_ids=[run_id]).get(run_id, {})
    going = {one["number"] for one in planned["trials"] if states.get(f"{TRIAL}_{one['number']}") not in ENDED}
    if not going:
        return PokeReturnValue(is_done=True)
    settings = from_env()
    store = connection.open_store(settings.bucket)
    try:
        stop_losers(store, settings.tracking_uri, planned, going)
    except UNANSWERED as error:
        log.warning("MLflow does not answer, so no trial is judged now: %s", error)
    for number in sorted(going):
        why = sweeps.stopped(store, planned["family"], planned["by"], number)
        if why is not None:
            _end_jobs(planned, number)
    return PokeReturnValue(is_done=False)


def stop_losers(store: Store, tracking_uri: str, planned: Planned, going: set[int]) -> dict[int, str]:
    """Write down which trials are stopped early, before they are: a look that is cut off is finished by the next."""
    assert planned["early_stop"] is not None
    family, by = planned["family"], planned["by"]
    runs = {number: noted.mlflow_run for number, noted in sweeps.noted(store, family, by).items()}
    curves = sweep_tracking.curves(tracking_uri, runs, planned["metric"])
    rule = EarlyStop.model_validate(planned["early_stop"])
    found = behind(curves, going & set(runs), rule, direction_of(planned["metric"]))
    for number, why in found.items():
        if sweeps.stop(store, family, by, number, Stop(early=True, told=why)):
            log.info("Trial %d is stopped early: %s", number, why)
    return found


def best(ti: Any = None) -> Chosen:
    """The task: compare what the trials that came to their end have measured, and choose."""
    planned = _planned(ti)
    settings = from_env()
    store = connection.open_store(settings.bucket)
    family, by, metric = planned["family"], planned["by"], planned["metric"]
    with no_retry():
        found = sweeps.outcomes(store, family, by, len(planned["trials"]), metric)
    winner = sweeps.best(found, direction_of(metric))
    told = {one["number"]: one["told"] for one in planned["trials"]}
    text = sweeps.table(found, told, metric, None if winner is None else winner.number)
    log.info("All trials:\n%s", text)
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=["close"], run_ids=[ti.run_id]).get(ti.run_id, {})
    if states.get("close") not in ENDED:  # cleared alone, nothing would end it again
        sweep_tracking.reopen(settings.tracking_uri, planned["parent"])
    if winner is None:
        raise AirflowFailException(f"No trial of sweep {by} came to its end with a finite {metric}: see their runs")
    run = sweeps.keep_result(store, family, by, found, winner.number)
    sweep_tracking.tell_best(settings.tracking_uri, planned["parent"], winner, metric, text)
    trial = planned["trials"][winner.number]
    log.info("Trial %d is the best: %s. Its run is %s", winner.number, trial["told"], winner.run)
    return Chosen(
        number=winner.number,
        run=run,
        conf={**trial["conf"], "sweep": {**trial["conf"]["sweep"], "candidate": True}},
        note=f"The best of sweep {by}: trial {winner.number}, {trial['told']}",
    )


def report(planned: Planned, chosen: Chosen) -> dict[str, str]:
    """The task: say on the sweep's MLflow run what became of its best trial."""
    settings = from_env()
    store = connection.open_store(settings.bucket)
    noted = sweeps.noted(store, planned["family"], planned["by"])[chosen["number"]]
    told = sweep_tracking.tell_candidate(settings.tracking_uri, planned["parent"], noted.mlflow_run)
    log.info("Trial %d, run %s: %s\n%s", chosen["number"], noted.run, told, planned["parent_url"])
    return told


def _planned(ti: Any) -> Planned:
    """The sweep that `plan` made. As a task's argument one that is not there would be looked for again for minutes.

    :raises AirflowFailException: if there is none.
    """
    planned: Planned | None = ti.xcom_pull(task_ids="plan", key="sweep")
    if planned is None:
        raise AirflowFailException("The sweep was not planned; the task `plan` says why")
    return planned


def close(ti: Any = None, run_id: str | None = None) -> PokeReturnValue:
    """The teardown's look: end the trials that still run, wait for their ends, and end the sweep's MLflow run.

    :raises AirflowFailException: if there is no candidate: of a sweep that a person ended the last tasks are skipped.
    """
    from airflow.sdk.bases.sensor import PokeReturnValue

    from dropforge import tracking

    assert run_id is not None
    planned = _planned(ti)
    settings = from_env()
    store = connection.open_store(settings.bucket)
    going = [one for one in planned["trials"] if state_of(ti, FINETUNE_DAG, one["run"]) in GOING]
    for one in going:
        why = Stop(early=False, told=f"its sweep {planned['by']} was ended")
        sweeps.stop(store, planned["family"], planned["by"], one["number"], why)
        _end_jobs(planned, one["number"])
    if going:
        log.info("Waiting for the ends of %s", ", ".join(one["run"] for one in going))
        return PokeReturnValue(is_done=False)
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    status, task = finetune_run.ending({name: states.get(name) for name in _DECISIVE})
    tags = {tracking.TAG_ENDED_BY: task} if task else {}
    tracking.close_run(settings.tracking_uri, planned["parent"], status, tags)
    log.info("Sweep %s: %s%s", planned["by"], status, f" ({task})" if task else "")
    if status != "FINISHED":
        raise AirflowFailException(f"The sweep ended at task {task}, whose log says why: {status.lower()}")
    return PokeReturnValue(is_done=True, xcom_value=status)


def _end_jobs(planned: Planned, number: int) -> None:
    """Delete a trial's jobs that run: its task sees that, and its run comes to an orderly end."""
    owner = f"{FINETUNE_DAG}/{planned['trials'][number]['run']}/"
    labels = {"dropforge/family": planned["family"]}
    place = planned["backend"], planned["kind"], planned["namespace"]
    for name in finetune_run.end_jobs_of(*place, labels, owner):
        log.info("Job %s of trial %d is deleted", name, number)
