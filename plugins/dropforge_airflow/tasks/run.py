"""A run's beginning and end: its folder, its MLflow run, its jobs' manifests."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from dropforge import layout, provenance
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec, Start, run_name
from dropforge.settings import Settings, from_env
from dropforge.tracking import Status
from dropforge_airflow import connection
from dropforge_airflow.tasks import turn
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.opened import Opened
from dropforge_airflow.tasks.plan import Plan

log = logging.getLogger(__name__)


def open_run(planned: Plan, curated: Curated, run_id: str | None = None) -> Opened:
    """The task: open the MLflow run and write `run.json`. Trying again opens the same run."""
    from dataclasses import replace

    from kubeflow_training.jobs.manifest import pytorch_job

    from dropforge import tracking
    from dropforge.job import evaluate_job, tokenise_job, train_job

    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        recipe = build_recipe(planned["recipe"])
        spec = make_spec(settings, planned, curated, recipe)
        tags = {tracking.TAG_DAG_RUN: run_id or ""}
        opened = tracking.open_run(settings.tracking_uri, spec, recipe.flat(), tags)
        spec = replace(spec, tracking=opened)
        # The teardown ends only runs whose task has succeeded.
        with tracking.failed_by_error(settings.tracking_uri, opened.run_id):
            store.put(layout.run_key(spec.run), spec.to_json())
            train, evaluate = pytorch_job(**train_job(spec, recipe)), pytorch_job(**evaluate_job(spec, recipe))
            tokenise = pytorch_job(**tokenise_job(spec, recipe)) if recipe.compute.tokenize_ahead else {}
    log.info("Run %s, MLflow run %s at %s", spec.run, opened.run_id, settings.tracking_uri)
    return Opened(
        run=spec.run,
        family=spec.family,
        root=spec.root,
        mlflow_run=opened.run_id,
        mlflow_url=f"{settings.tracking_uri}/#/experiments/{opened.experiment_id}/runs/{opened.run_id}",
        backend=recipe.compute.backend,
        retries=recipe.compute.retries,
        opened_at=time.time(),
        tokenise=tokenise,
        train=train,
        evaluate=evaluate,
    )


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
            **{name: value for name in ("parts", "retrain") if (value := planned.get(name))},
        },
        start=None if start is None else Start.read(start),
    )


def ending(states: Mapping[str, str | None], own: str = "close_run") -> tuple[Status, str]:
    """How a run ended, from the states of its tasks: the status for MLflow, and the task that decided it.

    A person who ends a DAG run leaves skipped tasks behind it; a task that fails leaves `upstream_failed` ones.
    """
    others = {task: state for task, state in states.items() if task != own}
    failed = sorted(task for task, state in others.items() if state == "failed")
    stopped = sorted(task for task, state in others.items() if state in {"skipped", "removed"})
    if stopped:
        return "KILLED", failed[0] if failed else stopped[0]
    if failed:
        return "FAILED", failed[0]
    unfinished = sorted(task for task, state in others.items() if state != "success")
    return ("FAILED", unfinished[0]) if unfinished else ("FINISHED", "")


def close_run(opened: Opened, ti: Any = None, run_id: str | None = None) -> str:
    """The teardown: end what still runs, and the MLflow run by what happened; give the family's turn to the next run.

    :raises AirflowFailException: if there is no model. Airflow would call a run that a person ended a success, because
        its last tasks are merely skipped.
    """
    from airflow.sdk.exceptions import AirflowFailException

    from dropforge import tracking

    settings = from_env()
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    status, task = ending(states)
    end_jobs(opened, f"{ti.dag_id}/{run_id}/")
    tags = {tracking.TAG_ENDED_BY: task} if task else {}
    tracking.close_run(settings.tracking_uri, opened["mlflow_run"], status, tags)
    turn.give_up(connection.open_store(settings.bucket), opened["family"], run_id or "")
    log.info("Run %s: %s%s", opened["run"], status, f" ({task})" if task else "")
    if status != "FINISHED":
        raise AirflowFailException(f"Run {opened['run']} ended at task {task}, whose log says why: {status.lower()}")
    return status


def end_jobs(opened: Opened, owner: str) -> None:
    """Delete the run's jobs that still run: a task that is ended while no triggerer watches cannot do it itself.

    :param owner: what the owner annotation of this run's jobs begins with.
    """
    from kubeflow_training.hooks import PyTorchJobHook
    from kubeflow_training.jobs.errors import JobError
    from kubeflow_training.jobs.manifest.words import OWNER_ANNOTATION
    from kubeflow_training.jobs.observation import observe

    namespace, label = opened["train"]["metadata"]["namespace"], {"dropforge/run": opened["run"]}
    try:
        backend = PyTorchJobHook(opened["backend"]).connect()
        for job in backend.jobs(namespace, labels=label):
            name = job.job["metadata"]["name"]
            if not str(job.annotations.get(OWNER_ANNOTATION)).startswith(owner):
                continue
            found = backend.read(name, namespace)
            if found is not None and not observe(found.job, found.pods, found.events).ended:
                backend.delete(name, namespace, uid=found.uid)
                log.warning("Job %s/%s still ran although its task had ended: it is deleted", namespace, name)
    except JobError as error:
        log.error("The jobs of run %s could not be looked at and may still run: %s", opened["run"], error)
