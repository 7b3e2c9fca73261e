"""MLflow, as Dropforge uses it: one run per run, however many attempts, and one registered model per family.

The DAG opens and ends runs; the trainer only logs into them. Every function is safe to call again after a crash.
`mlflow` is imported inside functions: it takes seconds, and DAG files may not pay for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from dropforge import descriptions, layout, mlflow_pages, registered_name, slices
from dropforge.errors import DataError, DropforgeError
from dropforge.promotion import Verdict
from dropforge.run import DATASET_DIGEST, RunSpec, Tracking
from dropforge.settings import without_login

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

Status = Literal["FINISHED", "FAILED", "KILLED"]

TAG_FAMILY: Final = registered_name.TAG_FAMILY
TAG_RUN: Final = "dropforge.run"
TAG_RUN_DIGEST: Final = "dropforge.run_digest"  # of its `run.json`, which its pods may write and this tag not
TAG_DROP: Final = "dropforge.drop"
TAG_SOURCE: Final = "dropforge.source"
TAG_DROPS: Final = "dropforge.drops"
TAG_RETRAIN: Final = "dropforge.retrain"
TAG_DATASET: Final = "dropforge.dataset"
TAG_DAG_RUN: Final = "dropforge.dag_run"
TAG_ATTEMPT: Final = "dropforge.attempt"
TAG_RESUMED: Final = "dropforge.resumed_from"
TAG_STEPS: Final = "dropforge.steps"
TAG_VERDICT: Final = "dropforge.verdict"
TAG_VERSION: Final = "dropforge.version"
TAG_STEP: Final = "dropforge.step"
TAG_CHECKPOINT: Final = "dropforge.checkpoint"
TAG_MODEL: Final = "dropforge.model_digest"
TAG_START: Final = "dropforge.start"
TAG_CODE: Final = "dropforge.user_code"
TAG_BASE: Final = "dropforge.base"  # and with _revision, _digest and _license behind it
TAG_DATA_LICENSE: Final = "dropforge.data_license"
TAG_PREVIOUS: Final = "dropforge.previous_champion"
TAG_ENDED_BY: Final = "dropforge.ended_by"
TAG_REASON: Final = "dropforge.reason"  # of its job, in the words of the job library; empty for other tasks
TAG_HEALTH: Final = "dropforge.health"  # what kept the training from going faster, in one line
TAG_ROLLED_BACK: Final = "dropforge.rolled_back"
TAG_APPROVAL: Final = "dropforge.approval"
TAG_COMPARE: Final = "dropforge.compare"  # on a run: MLflow's view of it beside that version's run
TAG_NOTE: Final = "mlflow.note.content"  # what MLflow shows as the description of a run or an experiment
TAG_PARENT: Final = "mlflow.parentRunId"  # MLflow's pages show a run below the one that it names
TAG_SWEEP: Final = "dropforge.sweep"  # the sweep's run in Airflow, on its own MLflow run
TAG_TRIAL: Final = "dropforge.trial"  # on a trial: its number
TAG_STOPPED: Final = "dropforge.stopped"  # on a trial: why its sweep ended it
TAG_BEST: Final = "dropforge.best"  # on a sweep: the run of its best trial
TAG_CHAMPION: Final = "dropforge.champion"  # on a run: the version that it was measured against
TAG_PLAN: Final = "dropforge.plan"  # what the run would take, in one line
TAG_CONFIRMED: Final = "dropforge.confirmed"  # who let it begin
TAG_COST: Final = "dropforge.cost"  # what it has used, in one line
TAG_FAILURE: Final = "dropforge.failure"  # why its last job failed, and where everything about that lies
TAG_CAUSES: Final = "dropforge.causes"  # why each of its trainings' jobs that failed did, in their order
TAG_LOST: Final = "dropforge.lost_steps"  # that all of them have done in vain
MOST_PARAM: Final = 6000  # characters of a parameter that MLflow takes
_VERSIONS: Final = "mlflow.modelVersions"
_BELOW: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")  # `model`, `exports/step-40-0123abcd`
_DENIED: Final = "PERMISSION_DENIED"
# With MLflow's basic-auth, what is not there is denied to all but administrators.
NOT_THERE: Final = frozenset({"RESOURCE_DOES_NOT_EXIST", _DENIED})
_CALENDAR: Final = 253_402_128_000_000  # 30 December 9999, wherever on earth
_PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Champion:
    """The model version that holds an alias.

    :param run: name of the run that made it, and :param digest: of its files, as they were registered; empty if not.
    :param created: when the version was registered; None if that is not known.
    :param dataset: digest of its dataset version, and :param drop: id of the drop that it was made of, as Airflow had
        them. :param run_digest: of the run's `run.json`, which pods may write; None if an earlier version made it.
    """

    version: str
    model: str
    run_id: str
    run: str = ""
    digest: str = ""
    created: datetime | None = None
    dataset: str = ""
    drop: str = ""
    run_digest: str | None = None


@dataclass(frozen=True)
class Registered:
    """What became of a candidate. `promoted` tells whether the alias now points to it."""

    version: str
    promoted: bool
    previous: str | None


@dataclass(frozen=True)
class Finished:
    """A run that has finished and whose model is registered, for which nothing is left to do.

    :param run: its name. :param mlflow_run, experiment: its ids in MLflow.
    """

    run: str
    version: str
    mlflow_run: str
    experiment: str

    def __str__(self) -> str:
        return f"Nothing new: the same rows and recipe as run {self.run}, version {self.version}"


def client(tracking_uri: str) -> MlflowClient:
    """A client for the server at `tracking_uri`. :raises DropforgeError: if the address carries a login."""
    from mlflow import MlflowClient

    without_login(tracking_uri)
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def open_run(tracking_uri: str, spec: RunSpec, params: Mapping[str, str], tags: Mapping[str, str]) -> Tracking:
    """Open the run's MLflow run, or the one that an earlier try opened. Parameters are logged once.

    A run that cannot be opened whole is ended as failed.

    :param params: of the recipe (`dropforge.recipe_params`).
    :param tags: provenance known to the caller, such as `dropforge.dag_run`.
    """
    from mlflow.entities import Param, RunTag

    mlflow = client(tracking_uri)
    experiment = experiment_of(mlflow, spec.family)
    all_tags = {
        TAG_RUN: spec.run,
        TAG_FAMILY: spec.family,
        **_data(spec),
        **{tag: value for tag, value in (("dropforge.git", spec.git), ("dropforge.image", spec.image)) if value},
        "mlflow.user": "dropforge",
        **_lineage(spec),
        **tags,
    }
    run = find_run(mlflow, experiment, spec.run)
    known = run.data.params if run is not None else {}
    new = [Param(key, value[:MOST_PARAM]) for key, value in params.items() if key not in known]
    again = run is not None
    if run is None:
        run = mlflow.create_run(experiment, run_name=descriptions.run_title(spec), tags=all_tags)
    with failed_by_error(tracking_uri, run.info.run_id):
        if again:
            mlflow.update_run(run.info.run_id, status="RUNNING")
            mlflow.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in all_tags.items()])
        for start in range(0, len(new), 100):  # the server's limit for one call
            mlflow.log_batch(run.info.run_id, params=new[start : start + 100])
        _log_dataset(mlflow, run.info.run_id, spec)
        _end_earlier(mlflow, spec, run.info.run_id, tags.get(TAG_DAG_RUN))
    return Tracking(uri=tracking_uri, run_id=run.info.run_id, experiment_id=experiment)


def _end_earlier(mlflow: MlflowClient, spec: RunSpec, opened: str, dag_run: str | None) -> None:
    """End the run that Airflow's run was before it was cleared: nothing else would, once it has another name."""
    for found in search(mlflow, TAG_DAG_RUN, dag_run, family=spec.family) if dag_run else ():
        if found.info.run_id != opened and found.info.status == "RUNNING" and TAG_RUN in found.data.tags:
            mlflow.set_tag(found.info.run_id, TAG_REASON, f"Airflow's run was cleared, and is {spec.run} now")
            mlflow.set_terminated(found.info.run_id, "KILLED")


def find_finished(tracking_uri: str, family: str, run: str, tags: Mapping[str, str]) -> Finished | None:
    """Return the run of this name that others have finished and registered; None if there is something left to do.

    Whoever has a tag in common with it is no other: a task that was cleared, or the trial and the candidate of a sweep.

    :param tags: as of `open_run`.
    """
    from mlflow.exceptions import MlflowException

    mlflow = client(tracking_uri)
    found = find_run(mlflow, experiment_of(mlflow, family), run)
    if found is None or found.info.status != "FINISHED":
        return None
    told = found.data.tags
    if _is_own(told, tags):
        return None
    version = told.get(TAG_VERSION, "")
    if not version:
        return None
    try:
        if mlflow.get_model_version(family, version).tags.get(TAG_RUN) != run:
            return None
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
        return None  # deleted since
    return Finished(run, version, found.info.run_id, found.info.experiment_id)


def holder(tracking_uri: str, family: str, run: str, tags: Mapping[str, str]) -> str | None:
    """Return the run of Airflow that opened the run of this name last, if it is another's, as `find_finished` says."""
    mlflow = client(tracking_uri)
    found = find_run(mlflow, experiment_of(mlflow, family), run)
    return None if found is None or _is_own(found.data.tags, tags) else found.data.tags.get(TAG_DAG_RUN)


def _is_own(told: Mapping[str, str], tags: Mapping[str, str]) -> bool:
    return any(name in tags and told.get(name) == tags[name] for name in (TAG_DAG_RUN, TAG_PARENT))


def log_drop(tracking_uri: str, run_id: str, entry: bytes) -> None:
    """Keep with the run what the ledger says of its data: each file's bucket, key, size, digest and S3 version."""
    client(tracking_uri).log_text(run_id, entry.decode(), "drop.json")


def log_recipe(tracking_uri: str, run_id: str, recipe: Mapping[str, Any]) -> None:
    """Keep the whole recipe with the run, of which its params are what differs from the defaults."""
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=120)
    client(tracking_uri).log_text(run_id, text, layout.RECIPE)


def close_run(tracking_uri: str, run_id: str, status: Status, tags: Mapping[str, str] | None = None) -> None:
    """End the MLflow run. A run that failed or was killed is not turned into a finished one."""
    mlflow = client(tracking_uri)
    for key, value in (tags or {}).items():
        mlflow.set_tag(run_id, key, value)
    current = mlflow.get_run(run_id).info.status
    if status == "FINISHED" and current in {"FAILED", "KILLED"}:
        return
    mlflow.set_terminated(run_id, status)


@contextmanager
def failed_by_error(tracking_uri: str, run_id: str) -> Iterator[None]:
    """End the MLflow run as failed if the block does not get to its end. The block's own error is what is raised."""
    try:
        yield
    except BaseException:
        try:
            with short_patience():
                close_run(tracking_uri, run_id, "FAILED")
        except Exception as error:
            log.error("MLflow run %s stays open: it could not be ended either (%s)", run_id, error)
        raise


@contextmanager
def short_patience() -> Iterator[None]:
    """Give up soon on a server that is away; MLflow's client alone tries for minutes."""
    before = {name: os.environ.get(name) for name in _PATIENCE}
    os.environ.update(_PATIENCE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def alias_tag(name: str, alias: str) -> str:
    """Name of a version's tag that holds for one alias: `TAG_PREVIOUS` or `TAG_ROLLED_BACK`."""
    return name if alias == "champion" else f"{name}.{alias}"


def rollback_command(family: str, alias: str, to: str = "") -> str:
    """What people type to take an alias from who holds it."""
    words = ["dropforge rollback", family, *(["--to", to] if to else [])]
    return " ".join([*words, *([] if alias == "champion" else ["--alias", alias])])


def told_tag(mlflow: MlflowClient, family: str, tags: Mapping[str, str], name: str, alias: str) -> str | None:
    """The tag by which a version is told something of an alias; None if it is told nothing.

    :param tags: of the version. :param name: `TAG_PREVIOUS` or `TAG_ROLLED_BACK`.
    """
    tag = alias_tag(name, alias)
    if tags.get(tag):
        return tag
    if alias == "champion" or name not in tags:
        return None
    # Versions of before have one tag for any alias: it is this one's where the family has no other.
    return None if by_alias(mlflow, family, "champion") is not None else name


def previous_holder(mlflow: MlflowClient, family: str, tags: Mapping[str, str], alias: str) -> str | None:
    """Who held an alias before a version did, `none` for the first one; None if that version never held it.

    :param tags: of the version.
    """
    tag = told_tag(mlflow, family, tags, TAG_PREVIOUS, alias)
    return None if tag is None else tags[tag]


def champion(tracking_uri: str, family: str, alias: str = "champion") -> Champion | None:
    """The version of `family` that holds `alias`; None when there is none."""
    version = by_alias(client(tracking_uri), family, alias)
    return None if version is None else as_champion(version)


def rival(tracking_uri: str, family: str, alias: str, run: str) -> Champion | None:
    """Whom the candidate of a run is compared with: the champion; if that is the candidate itself, whom it replaced."""
    from mlflow.exceptions import MlflowException

    mlflow = client(tracking_uri)
    version = by_alias(mlflow, family, alias)
    if version is not None and version.tags.get(TAG_RUN) == run and TAG_CHECKPOINT not in version.tags:
        number = previous_holder(mlflow, family, version.tags, alias) or "none"
        try:
            version = None if number == "none" else mlflow.get_model_version(family, number)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            version = None  # deleted since
    return None if version is None else as_champion(version)


def as_champion(version: ModelVersion) -> Champion:
    """What is known of a version's model."""
    return Champion(
        str(version.version),
        version.source or "",
        version.run_id or "",
        version.tags.get(TAG_RUN, ""),
        version.tags.get(TAG_MODEL, ""),
        moment(version.creation_timestamp) if version.creation_timestamp else None,
        version.tags.get(TAG_DATASET, ""),
        version.tags.get(TAG_DROP, ""),
        version.tags.get(TAG_RUN_DIGEST),
    )


def moment(milliseconds: int) -> datetime | None:
    """When something was, by MLflow's milliseconds since 1970; None for what no calendar has."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if 0 <= milliseconds < _CALENDAR else None


def side_by_side(tracking_uri: str, run_id: str, family: str, version: str) -> str | None:
    """MLflow's compare view of a candidate's run and the run that made a version; None if that has none any more."""
    from mlflow.exceptions import MlflowException

    mlflow = client(tracking_uri)
    try:
        other = mlflow.get_model_version(family, version).run_id
        runs = [mlflow.get_run(one) for one in (run_id, other)] if other and other != run_id else []
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
        return None
    ids, experiments = [run.info.run_id for run in runs], [run.info.experiment_id for run in runs]
    return mlflow_pages.compare_view(tracking_uri, ids, experiments) if runs else None


def log_evaluation(
    tracking_uri: str, run_id: str, family: str, evaluation: Mapping[str, Any], verdict: Verdict, step: int
) -> None:
    """Put the measurement of candidate and champion, and the verdict, on the MLflow run.

    :param evaluation: the content of `evaluation.json`.
    :param step: the optimizer step of the final model.
    """
    import time

    from mlflow.entities import Metric, RunTag

    now = int(time.time() * 1000)
    metrics = [
        Metric(f"{side}/{name.removeprefix('eval/')}", float(value), now, step)
        for side in ("candidate", "champion")
        for name, value in (evaluation.get(side) or {}).items()
        if name.startswith(("eval/", "gen/", "holdout/", "model/"))
    ]
    metrics += [
        Metric(slices.metric_name(side, one["by"], one["name"], name), float(value), now, step)
        for one in evaluation.get("slices") or ()
        for side in ("candidate", "champion")
        for name, value in (one.get(side) or {}).items()
    ]
    gain = evaluation.get("gain") or {}
    metrics += [
        Metric(name, float(gain[key]), now, step)
        for name, key in (("promote/gain", "value"), ("promote/gain_low", "low"), ("promote/gain_high", "high"))
        if gain.get(key) is not None
    ]
    kept = "keep champion" if evaluation.get("champion_version") else "not promoted"
    word = "promote" if verdict.promote else kept
    tags = {TAG_VERDICT: f"{word}: {verdict.reason}"[:4900]}
    mlflow, page = client(tracking_uri), verdict.as_markdown()
    if version := evaluation.get("champion_version"):
        tags[TAG_CHAMPION] = str(version)
        if link := side_by_side(tracking_uri, run_id, family, str(version)):
            tags[TAG_COMPARE] = link
            page += f"\n\n[Candidate and champion side by side]({link})"
    for start in range(0, len(metrics), 900):  # the server takes 1000
        mlflow.log_batch(run_id, metrics=metrics[start : start + 900])
    mlflow.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    mlflow.log_text(run_id, page + "\n", "verdict.md")


def note(tracking_uri: str, run_id: str, tag: str, text: str) -> None:
    """Show a line on the MLflow run, such as until when a person is asked, or what the answer was."""
    client(tracking_uri).set_tag(run_id, tag, text[:4900])


def describe(tracking_uri: str, run_id: str, text: str) -> None:
    """Set the description of an MLflow run, unless somebody has written another one. :param text: Markdown."""
    mlflow = client(tracking_uri)
    known = mlflow.get_run(run_id).data.tags.get(TAG_NOTE, "")
    if not known or known.partition(", version")[0] == text.partition(", version")[0]:
        mlflow.set_tag(run_id, TAG_NOTE, text[:4900])


def show_result(tracking_uri: str, run_id: str, spec: RunSpec, version: str, *, promoted: bool) -> None:
    """Say in the name of an MLflow run what came of it, unless it has another name by now."""
    mlflow = client(tracking_uri)
    if str(mlflow.get_run(run_id).info.run_name).startswith(descriptions.run_title(spec)):
        mlflow.update_run(run_id, name=descriptions.ended_title(spec, version, promoted=promoted))


def log_hours(tracking_uri: str, run_id: str, metrics: Mapping[str, float], tag: str, text: str) -> None:
    """Put what a run would take, or has taken, on its MLflow run: figures, and all of it in a line."""
    import time

    from mlflow.entities import Metric, RunTag

    now = int(time.time() * 1000)
    found = [Metric(name, value, now, 0) for name, value in metrics.items()]
    client(tracking_uri).log_batch(run_id, metrics=found, tags=[RunTag(tag, text[:4900])])


def log_wall(tracking_uri: str, run_id: str, wall: Mapping[str, float], step: int) -> None:
    """Put the seconds of each phase of a run on its MLflow run. :param step: the optimizer step of the final model."""
    import time

    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [
        Metric("wall/seconds" if name == "seconds" else f"wall/{name}_seconds", value, now, step)
        for name, value in wall.items()
    ]
    client(tracking_uri).log_batch(run_id, metrics=metrics)


def register(
    tracking_uri: str,
    spec: RunSpec,
    report: Mapping[str, Any],
    verdict: Verdict,
    *,
    alias: str,
    compared_with: str | None,
    hold: AbstractContextManager[None] | None = None,
) -> Registered:
    """Register the run's model as a version of its family; move `alias` to it if the verdict says so.

    :param report: the content of `report.json`.
    :param compared_with: version of the champion the candidate was measured against; None if there was none.
    :param hold: keeps others from moving the alias, see `dropforge.moves`.
    :raises DropforgeError: if the champion is another one by now, so that the verdict says nothing about it, if
        somebody rolled this version back or deleted it, if it holds the alias against the verdict, or if the model
        lies elsewhere than below the run's own folder.
    """
    mlflow = client(tracking_uri)
    version = _version(mlflow, spec, report)
    number = str(version.version)
    if spec.tracking is not None:  # whatever becomes of the alias, the run has its version
        mlflow.set_tag(spec.tracking.run_id, TAG_VERSION, number)
    if (model := _exported(mlflow, spec, report.get("exported_step"))) is not None:
        _link(mlflow, model, spec.family, number)
    with hold or nullcontext():
        previous = _promoted(mlflow, spec.family, number, verdict, alias, compared_with)
    if version.description in (None, "", _made_by(spec)):  # else a person has written there
        mlflow.update_model_version(spec.family, number, descriptions.of_version(spec, verdict, number))
    mlflow.set_model_version_tag(spec.family, number, TAG_VERDICT, verdict.reason[:4900])
    return Registered(number, verdict.promote, None if previous in {None, "none"} else previous)


def _promoted(
    mlflow: MlflowClient, family: str, number: str, verdict: Verdict, alias: str, compared_with: str | None
) -> str | None:
    """Move the alias to a version, if the verdict says so and it may; who held it before."""
    tags = mlflow.get_model_version(family, number).tags
    current = by_alias(mlflow, family, alias)
    holder = str(current.version) if current is not None else None
    if holder == number and not verdict.promote:
        raise DropforgeError(
            f"version {number} of {family}",
            f"it is {alias!r} already, and a verdict takes no alias away ({verdict.reason})",
            f"If it should not be: `{rollback_command(family, alias)}`",
        )
    if not verdict.promote or holder == number:
        return previous_holder(mlflow, family, tags, alias)
    if tag := told_tag(mlflow, family, tags, TAG_ROLLED_BACK, alias):
        raise DropforgeError(
            f"version {number} of {family}",
            f"it was rolled back ({tags[tag]})",
            f"If it should be {alias!r} again: `{rollback_command(family, alias, to=number)}`",
        )
    if holder != compared_with:
        raise DropforgeError(
            f"alias {alias!r} of {family}",
            f"it moved from version {compared_with or 'none'} to {holder or 'none'} since the comparison",
            "Clear the task `champion` and those after it to compare again",
        )
    mlflow.set_model_version_tag(family, number, alias_tag(TAG_PREVIOUS, alias), holder or "none")
    mlflow.set_registered_model_alias(family, alias, number)
    return holder


def register_checkpoint(
    tracking_uri: str, spec: RunSpec, model: Mapping[str, Any], step: int, digest: str, model_id: str
) -> str:
    """Register the model of a run's checkpoint as a version of its family, or find the version that it has.

    No alias moves: nobody has compared it. :param model: `uri` and `digest` of its folder.
    :param digest: of the checkpoint. :param model_id: the logged model that stands for it. :returns: the version.
    :raises DataError: if the model lies elsewhere than below the run's own folder.
    """
    mlflow, source = client(tracking_uri), _source(spec, model)
    _registered_model(mlflow, spec)
    for version in mlflow.search_model_versions(f"name = '{spec.family}'"):
        if version.tags.get(TAG_CHECKPOINT) == digest and version.tags.get(TAG_RUN) == spec.run:
            return str(version.version)
    made = mlflow.create_model_version(
        spec.family,
        source=source,
        run_id=spec.tracking.run_id if spec.tracking else None,
        tags={**_provenance(mlflow, spec, model), TAG_CHECKPOINT: digest, TAG_STEP: str(step)},
        description=f"Checkpoint step-{step} of run {spec.run} on dataset {spec.dataset_digest[:12]}",
        model_id=model_id,
    )
    _link(mlflow, mlflow.get_logged_model(model_id), spec.family, str(made.version))
    return str(made.version)


def find_run(mlflow: MlflowClient, experiment: str, run: str) -> Run | None:
    """The MLflow run of the run named `run`, the oldest if several were made by accident."""
    found = mlflow.search_runs(
        [experiment], f"tags.`{TAG_RUN}` = '{run}'", max_results=1, order_by=["attributes.start_time ASC"]
    )
    return found[0] if found else None


def search(
    mlflow: MlflowClient,
    tag: str,
    value: str | None = None,
    *,
    family: str | None = None,
    limit: int = 100,
    also: str = "",
) -> list[Run]:
    """Runs that carry a tag, or a tag with this value, over all families or one; the newest first.

    :param also: a further condition, as MLflow's filters are written.
    """
    experiments = [
        experiment.experiment_id
        for experiment in mlflow.search_experiments()
        if family is None or experiment.name == family
    ]
    test = "LIKE '%'" if value is None else f"= '{value.replace(chr(39), '')}'"
    order = ["attributes.start_time DESC"]
    wanted = f"tags.`{tag}` {test}" + (f" AND {also}" if also else "")
    return list(mlflow.search_runs(experiments, wanted, max_results=limit, order_by=order))


def experiment_of(mlflow: MlflowClient, family: str) -> str:
    """The family's experiment, made if there is none. :raises DataError: if one of somebody else has its name."""
    from mlflow.exceptions import MlflowException

    experiment = mlflow.get_experiment_by_name(family)
    if experiment is not None:
        _own(mlflow, experiment, family)
        if experiment.lifecycle_stage != "active":
            mlflow.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)
    try:
        # Without the kind MLflow opens the experiment as one of traces and prompts, and hides the runs.
        tags = {
            "mlflow.experimentKind": "custom_model_development",
            TAG_NOTE: descriptions.of_family(family),
            registered_name.TAG_FAMILY: family,
        }
        return str(mlflow.create_experiment(family, tags=tags))
    except MlflowException:  # another run of the family was first
        experiment = mlflow.get_experiment_by_name(family)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def _own(mlflow: MlflowClient, experiment: Experiment, family: str) -> None:
    """Mark an experiment of an earlier version as the family's. :raises DataError: if it is somebody else's."""
    if registered_name.is_marked(experiment.tags, family):
        return
    registered_name.check_experiment(mlflow.tracking_uri, family)
    if experiment.lifecycle_stage == "active":
        mlflow.set_experiment_tag(experiment.experiment_id, registered_name.TAG_FAMILY, family)


def _version(mlflow: MlflowClient, spec: RunSpec, report: Mapping[str, Any]) -> ModelVersion:
    model = report["model"]
    source = _source(spec, model)
    _registered_model(mlflow, spec)
    for version in mlflow.search_model_versions(f"name = '{spec.family}'"):
        if version.tags.get(TAG_RUN) == spec.run and TAG_CHECKPOINT not in version.tags:
            return version
    if spec.tracking is not None and (had := mlflow.get_run(spec.tracking.run_id).data.tags.get(TAG_VERSION)):
        # Its marks went with it: that it was rolled back, and what people said of it.
        raise DropforgeError(
            f"version {had} of {spec.family}",
            "it was deleted since this run registered it",
            "Train again for another version, or delete the tag `dropforge.version` of its MLflow run first",
        )
    return mlflow.create_model_version(
        spec.family,
        source=source,
        run_id=spec.tracking.run_id if spec.tracking else None,
        tags=_provenance(mlflow, spec, model),
        description=_made_by(spec),
    )


def _made_by(spec: RunSpec) -> str:
    return f"Run {spec.run} on dataset {spec.dataset_digest[:12]}"


def _source(spec: RunSpec, model: Mapping[str, Any]) -> str:
    """The address of a run's model as its pods tell it. :raises DataError: if it is not below the run's own folder."""
    uri, own = str(model["uri"]), f"{spec.root}/"
    if not uri.startswith(own) or not _BELOW.fullmatch(uri.removeprefix(own)):
        raise DataError(
            f"model of run {spec.run}",
            f"its address {uri!r:.200} is not below the run's own folder {own}",
            "Restore `report.json` of that folder from the bucket's versions",
        )
    return uri


def _exported(mlflow: MlflowClient, spec: RunSpec, step: int | None) -> LoggedModel | None:
    """The logged model of the checkpoint whose weights the run's model has, with its figures; None if it has none."""
    if spec.tracking is None or step is None:
        return None
    found = mlflow.search_logged_models(
        [spec.tracking.experiment_id],
        f"source_run_id = '{spec.tracking.run_id}' AND tags.`{TAG_STEP}` = '{step}'",
        max_results=1,
    )
    return found[0] if found else None


def _link(mlflow: MlflowClient, model: LoggedModel, family: str, number: str) -> None:
    """Have MLflow's pages lead from a logged model to its version, as `mlflow.register_model` has them."""
    known = _linked(model.tags.get(_VERSIONS) or "[]")
    this = {"name": family, "version": number}
    if this not in known:
        mlflow.set_logged_model_tags(model.model_id, {_VERSIONS: json.dumps([*known, this])})


def _linked(text: str) -> list[dict[str, Any]]:
    """The versions that a logged model's tag names; anybody may write it, and what cannot be read is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return [row for row in rows if all(isinstance(value, str | int) for value in row.values())]


def _registered_model(mlflow: MlflowClient, spec: RunSpec) -> None:
    """The family's model, made if there is none. :raises DataError: if its name is somebody else's."""
    from mlflow.exceptions import MlflowException

    try:
        mlflow.create_registered_model(
            spec.family, tags={TAG_FAMILY: spec.family}, description=descriptions.of_family(spec.family)
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        registered_name.check_name(mlflow.tracking_uri, spec.family)


def _provenance(mlflow: MlflowClient, spec: RunSpec, model: Mapping[str, Any]) -> dict[str, str]:
    run = None if spec.tracking is None else mlflow.get_run(spec.tracking.run_id)
    opened = None if run is None else run.data.tags.get(TAG_RUN_DIGEST)
    return {
        TAG_RUN: spec.run,
        **({TAG_RUN_DIGEST: opened} if opened else {}),
        **_data(spec),
        TAG_MODEL: str(model["digest"]),
        **_origins(spec, model),
        "dropforge.method": str(spec.recipe["train"]["method"]),
        **_lineage(spec),
    }


def _origins(spec: RunSpec, model: Mapping[str, Any]) -> dict[str, str]:
    """The base model, what pins it, and the licences of what went in, as far as they are known."""
    base = model.get("base") or {}
    tags = {f"{TAG_BASE}{f'_{key}' if key != 'model' else ''}": str(value)[:4900] for key, value in base.items()}
    terms = (spec.recipe.get("data") or {}).get("license")
    return tags | ({TAG_DATA_LICENSE: str(terms)[:4900]} if terms else {})


def _data(spec: RunSpec) -> dict[str, str]:
    """Which bytes went in: the drop's entry in the ledger has each file with its size, content and version."""
    return {
        TAG_DROP: str(spec.drop.get("id", "")),
        TAG_SOURCE: str(spec.drop.get("prefix", "")),
        TAG_DATASET: spec.dataset_digest,
        **_calendar(spec),
    }


def _calendar(spec: RunSpec) -> dict[str, str]:
    """Several uploads by name and id, and why the calendar started the run."""
    parts, retrain = spec.drop.get("parts") or (), spec.drop.get("retrain") or {}
    drops = ", ".join(f"{part['drop']} ({part['id']})" for part in parts)
    tags = {TAG_DROPS: drops, TAG_RETRAIN: str(retrain.get("reason", ""))}
    return {name: text[:4900] for name, text in tags.items() if text}


def _log_dataset(mlflow: MlflowClient, run_id: str, spec: RunSpec) -> None:
    """The dataset version as MLflow's pages know one. Told twice it stands there once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": spec.dataset, "drop": spec.drop.get("prefix", "")})
    # The tag has the whole digest.
    dataset = Dataset(name=spec.family, digest=spec.dataset_digest[:DATASET_DIGEST], source_type="s3", source=source)
    mlflow.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


def _lineage(spec: RunSpec) -> dict[str, str]:
    """Where the weights began, and the wheel that took part: what else than its data a model goes back to."""
    code = spec.recipe.get("code") or {}
    own = {TAG_CODE: f"{code['wheel'].rpartition('/')[2]} ({code['sha256']})"} if code else {}
    return own if spec.start is None else {**own, TAG_START: str(spec.start)}


def by_alias(mlflow: MlflowClient, family: str, alias: str) -> ModelVersion | None:
    """The version of a family that holds an alias."""
    from mlflow.exceptions import MlflowException

    try:
        return mlflow.get_model_version_by_alias(family, alias)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        if error.error_code == _DENIED and not mlflow.search_registered_models(f"name = '{family}'"):
            return None
        raise
