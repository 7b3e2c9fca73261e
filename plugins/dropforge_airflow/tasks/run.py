"""A run's beginning and end: its folder, its MLflow run, its jobs' manifests."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from airflow.sdk.exceptions import AirflowSkipException

from dropforge import confirmation, gangs, in_flight, layout, provenance, sweep_tracking, sweeps, unsent
from dropforge.forecast import Forecast
from dropforge.lock import locked
from dropforge.mlflow_pages import run_page
from dropforge.recipe import Recipe
from dropforge.recipe_params import to_params
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec, Start, run_name
from dropforge.settings import Settings, from_env
from dropforge.stages import NOTHING_NEW, STAGES, TEARDOWNS
from dropforge.store import MissingObjectError, Store
from dropforge.tracking import Finished, Status
from dropforge_airflow import connection
from dropforge_airflow.dag_runs import ACTIVE, state_of
from dropforge_airflow.job_manifests import kind_for, manifest
from dropforge_airflow.tasks import bundle, meter, turn
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.opened import Opened, read_spec
from dropforge_airflow.tasks.plan import Plan
from dropforge_airflow.tasks.trial import trial_ending

log = logging.getLogger(__name__)


class NothingNew(AirflowSkipException):
    """Others have finished the run and registered its model. :param found: that run. :param page: in MLflow."""

    def __init__(self, found: Finished, page: str) -> None:
        super().__init__(str(found))
        self.found, self.page = found, page


def open_run(
    planned: Plan,
    curated: Curated,
    run_id: str | None = None,
    forecast: Mapping[str, Any] | None = None,
    partition_key: str | None = None,
    ti: Any = None,
) -> Opened:
    """The task: open the MLflow run and write `run.json`. Trying again opens the same run.

    :param forecast: what the run would take (`dropforge.forecast.Forecast`).
    :param partition_key: of the drop's event; None for runs that were started by hand.
    :raises NothingNew: if another run of Airflow has finished it, whose MLflow run and version stay as they are.
    """
    from dataclasses import replace

    from dropforge import tracking
    from dropforge.job import evaluate_job, tokenise_job, train_job

    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        recipe = build_recipe(planned["recipe"])
        sweep = planned.get("sweep")
        sweeps.refuse_stopped(store, planned["family"], sweep)
        tags = {tracking.TAG_DAG_RUN: run_id or ""} | (sweep_tracking.trial_tags(sweep) if sweep else {})
        # Of two that come to the same rows at once, the second sees what the first has opened.
        with opening(store, planned["family"], run_id or ""):
            spec, found = name_run(settings, planned, curated, recipe, tags, partial(_is_going, ti))
            if found is not None:
                log.info("%s. Tick `again` in the form, or drop it with --again, to train on it all the same", found)
                in_flight.run_ended(store, partition_key, run_id or "")
                raise NothingNew(found, run_page(settings.tracking_uri, found.experiment, found.mlflow_run))
            kind = kind_for(recipe.compute)  # before anything of the run is there: its cluster may be away
            opened = tracking.open_run(settings.tracking_uri, spec, to_params(recipe), tags)
        spec = replace(spec, tracking=opened)
        # The teardown ends only runs whose task has succeeded.
        with tracking.failed_by_error(settings.tracking_uri, opened.run_id):
            store.put(layout.run_key(spec.run), spec.to_json())
            tracking.note(settings.tracking_uri, opened.run_id, tracking.TAG_RUN_DIGEST, spec.digest)
            tracking.log_recipe(settings.tracking_uri, opened.run_id, recipe.plain())
            with suppress(MissingObjectError):  # a dataset version that is named has no drop
                entry = store.get(layout.ledger_key(spec.family, planned["drop_id"]))
                tracking.log_drop(settings.tracking_uri, opened.run_id, entry)
            if forecast is not None:
                plan = Forecast.from_dict(forecast)
                store.put(layout.forecast_key(spec.run), json.dumps(plan.to_dict(), indent=1).encode())
                tracking.log_hours(settings.tracking_uri, opened.run_id, plan.metrics(), tracking.TAG_PLAN, str(plan))
            if sweep:
                sweeps.note(store, spec.family, sweep, spec.run, opened.run_id)
            # A model that is there is not trained again, and no gang waits for GPUs only to find that out.
            done = store.stat(layout.report_key(spec.run)) is not None
            train, evaluate = (manifest(build(spec, recipe), kind) for build in (train_job, evaluate_job))
            tokenise = manifest(tokenise_job(spec, recipe), kind) if recipe.compute.tokenize_ahead else {}
    log.info("Run %s, MLflow run %s at %s", spec.run, opened.run_id, settings.tracking_uri)
    if recipe.compute.backend == "kubernetes":
        log.info("Its jobs are of kind %s", kind.name)
    return Opened(
        run=spec.run,
        family=spec.family,
        root=spec.root,
        run_digest=spec.digest,
        mlflow_run=opened.run_id,
        mlflow_url=run_page(settings.tracking_uri, opened.experiment_id, opened.run_id),
        backend=recipe.compute.backend,
        retries=recipe.compute.retries,
        opened_at=time.time(),
        tokenise={} if done else tokenise,
        train={} if done else train,
        evaluate=evaluate,
        sweep=sweep,
    )


def opening(store: Store, family: str, run_id: str) -> AbstractContextManager[None]:
    """Hold the names of the family's runs; waits for others. :param run_id: of Airflow's run that opens one."""
    return locked(store, layout.opening_key(family), run_id, f"runs of family {family}", "opening one")


def name_run(
    settings: Settings,
    planned: Plan,
    curated: Curated,
    recipe: Recipe,
    tags: Mapping[str, str],
    is_going: Callable[[str], bool],
) -> tuple[RunSpec, Finished | None]:
    """Return what `run.json` will say, and who has done it all already, if others have.

    Two drops of the same rows count each for itself. A run that is to train all the same takes the next counter that
    is free of finished runs, and each one that is free of those for which another run of Airflow is running.

    :param tags: by which its MLflow run is known as its own. :param is_going: whether a run of Airflow is running.
    """
    from dropforge import tracking

    for counter in itertools.count(planned["counter"]):
        spec = make_spec(settings, Plan(**{**planned, "counter": counter}), curated, recipe)
        found = tracking.find_finished(settings.tracking_uri, spec.family, spec.run, tags)
        holder = None if found is not None else tracking.holder(settings.tracking_uri, spec.family, spec.run, tags)
        if holder and is_going(holder):
            log.info("Run %s of the same rows and recipe is running for %s, and is left to it", spec.run, holder)
            continue
        if found is None or not (planned.get("again") or planned.get("sweep")):
            return spec, found
    raise AssertionError  # the count has no end


def _is_going(ti: Any, run: str) -> bool:
    return ti is not None and state_of(ti, ti.dag_id, run) in ACTIVE


def make_spec(settings: Settings, planned: Plan, curated: Curated, recipe: Recipe) -> RunSpec:
    """What `run.json` will say, tracking left out."""
    image = recipe.compute.image if recipe.compute.backend == "kubernetes" else ""
    identity = image or provenance.code_digest()
    run = run_name(planned["family"], recipe.plain(), curated["digest"], identity, planned["counter"])
    start = planned.get("start")
    prefix = planned.get("prefix") or layout.drop_prefix(planned["family"], planned["drop"])
    return RunSpec(
        run=run,
        family=planned["family"],
        counter=planned["counter"],
        root=f"{settings.root}/{layout.run_prefix(run)}".rstrip("/"),
        data_root=settings.root,
        dataset=curated["manifest"],
        dataset_digest=curated["digest"],
        recipe=recipe.plain(),
        code=identity,
        image=image,
        git=provenance.git_revision(),
        drop={
            "family": planned["family"],
            "drop": planned["drop"],
            "id": planned["drop_id"],
            "prefix": prefix if "://" in prefix else f"{settings.root}/{prefix}",
            **{name: value for name in ("parts", "retrain", "sweep") if (value := planned.get(name))},
        },
        start=None if start is None else Start.read(start),
        date=planned.get("date", ""),
    )


def ending(states: Mapping[str, str | None], own: Collection[str] = TEARDOWNS) -> tuple[Status, str]:
    """How a run ended, from the states of its tasks: the status for MLflow, and the task that decided it.

    A person who ends a DAG run leaves skipped tasks behind it; a task that fails leaves `upstream_failed` ones.
    """
    others = {task: state for task, state in states.items() if task not in own}
    failed = sorted(task for task, state in others.items() if state == "failed")
    stopped = sorted(task for task, state in others.items() if state in {"skipped", "removed"})
    if stopped:
        return "KILLED", failed[0] if failed else stopped[0]
    if failed:
        return "FAILED", failed[0]
    unfinished = sorted(task for task, state in others.items() if state != "success")
    return ("FAILED", unfinished[0]) if unfinished else ("FINISHED", "")


def refused(store: Store, run: str) -> bool:
    """Whether the last word on the run was that it may not begin."""
    word = confirmation.read(store, run)
    return word is not None and not word.start


def close_run(opened: Opened, ti: Any = None, run_id: str | None = None, partition_key: str | None = None) -> str:
    """The teardown: end what still runs, and the MLflow run by what happened; give the family's turn, and the slot in
    flight, to the next run.

    :raises AirflowFailException: if there is no model. Airflow would call a run that a person ended a success, because
        its last tasks are merely skipped.
    """
    from airflow.sdk.exceptions import AirflowFailException

    from dropforge import tracking

    settings = from_env()
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    store = connection.open_store(settings.bucket)
    status, task, tags = trial_ending(store, opened, states, ending(states))
    if task == "confirm" and refused(store, opened["run"]):
        status = "KILLED"  # by a person's word, or by the recipe's in the place of one
    end_jobs(opened, f"{ti.dag_id}/{run_id}/")
    taken = _settled(store, opened, ti)
    send_unsent(store, opened)
    tags |= _unlinked(store, opened)
    tags |= {tracking.TAG_ENDED_BY: task, tracking.TAG_REASON: _reason(store, opened, task)} if task else {}
    tracking.close_run(settings.tracking_uri, opened["mlflow_run"], status, tags)
    turn.give_up(store, opened["family"], run_id or "")
    in_flight.run_ended(store, partition_key, run_id or "")
    log.info("Run %s: %s%s; %s", opened["run"], status, f" ({task})" if task else "", taken)
    if status != "FINISHED":
        raise AirflowFailException(f"Run {opened['run']} ended at task {task}, whose log says why: {status.lower()}")
    return status


def watcher(ti: Any = None, run_id: str | None = None) -> str:
    """The look at a run that may never have been opened, which has no teardown: Airflow would call it a success if a
    person ended it, because its last tasks are merely skipped.

    :raises AirflowSkipException: if there was nothing to do.
    :raises AirflowFailException: if the run has ended before it was opened.
    """
    from airflow.sdk.exceptions import AirflowFailException

    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    early = STAGES[: STAGES.index("open_run") + 1]
    left = next((task for task in early if states.get(task) != "success"), None)
    if left is None:
        return "the run was opened: `close_run` says how it ended"
    if states.get(left) == "skipped" and (told := ti.xcom_pull(task_ids=left, key=NOTHING_NEW)):
        raise AirflowSkipException(str(told["told"]))
    raise AirflowFailException(f"The run ended at task {left}, before it was opened: {states.get(left)}")


def _reason(store: Store, opened: Opened, task: str) -> str:
    """Why the job of a task ended badly; empty for a task without one. It is no reason to leave the run open."""
    try:
        return gangs.why_ended(gangs.kept(store, opened["run"]), task)
    except Exception as error:
        log.warning("Why run %s ended is not known: %r", opened["run"], error)
        return ""


def _unlinked(store: Store, opened: Opened) -> dict[str, str]:
    """Why trainings failed, if MLflow was away when that was seen. It is no reason to leave the run open."""
    try:
        return bundle.unlinked(store, read_spec(store, opened))
    except Exception as error:
        log.warning("Why trainings of run %s failed is not on its MLflow run: %r", opened["run"], error)
        return {}


def _settled(store: Store, opened: Opened, ti: Any) -> str:
    """What the run has used, told in MLflow. That nobody knows it is no reason to leave the run open."""
    try:
        return str(meter.settle(store, read_spec(store, opened), opened["mlflow_run"], meter.seen_starts(ti)))
    except Exception as error:
        log.warning("What run %s has used is not known: %r", opened["run"], error)
        return "what it has used is not known"


def send_unsent(store: Store, opened: Opened) -> None:
    """What MLflow did not take of a training, before the run ends. It is no reason to fail it or to leave it open."""
    try:
        if sent := unsent.send(store, opened["run"], from_env().tracking_uri, opened["mlflow_run"]):
            log.info("%d metrics and tags, for which MLflow was away, are there now", sent)
    except Exception as error:
        log.warning("What MLflow did not take of run %s stays in its folder: %r", opened["run"], error)


def end_jobs(opened: Opened, owner: str) -> None:
    """Delete the run's jobs that still run: a task that is ended while no triggerer watches cannot do it itself.

    :param owner: what the owner annotation of this run's jobs begins with.
    """
    namespace, labels = opened["evaluate"]["metadata"]["namespace"], {"dropforge/run": opened["run"]}
    for name in end_jobs_of(opened["backend"], opened["evaluate"]["kind"], namespace, labels, owner):
        log.warning("Job %s still ran although its task had ended: it is deleted", name)


def end_jobs_of(place: str, kind: str, namespace: str, labels: Mapping[str, str], owner: str) -> list[str]:
    """Delete jobs that have not ended; their names. What cannot be looked at is told in the log, and may still run.

    :param place: the backend. :param kind: of the jobs. :param owner: what their owner annotation begins with.
    """
    from kubeflow_training.hooks import PyTorchJobHook
    from kubeflow_training.jobs.errors import JobError
    from kubeflow_training.jobs.manifest.words import OWNER_ANNOTATION
    from kubeflow_training.jobs.observation import observe

    ended: list[str] = []
    try:
        backend = PyTorchJobHook(place, kind=kind).connect()
        for job in backend.jobs(namespace, labels=dict(labels)):
            name = job.job["metadata"]["name"]
            if not str(job.annotations.get(OWNER_ANNOTATION)).startswith(owner):
                continue
            found = backend.read(name, namespace)
            if found is not None and not observe(found.job, found.pods, found.events).ended:
                backend.delete(name, namespace, uid=found.uid)
                ended.append(f"{namespace}/{name}")
    except JobError as error:
        log.error("The jobs of %s could not be looked at and may still run: %s", owner, error)
    return ended
