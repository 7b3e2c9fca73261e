"""Operators of the fine-tune DAG: curation here or as a job on Kubernetes, the run's opening, and its metered jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTimeout
from kubeflow_training.exceptions import JobFailedForGood
from kubeflow_training.gangs.memory import Memory
from kubeflow_training.jobs.observation import Phase, Reason
from kubeflow_training.links import MLFLOW_LINK_KEY, MlflowRunLink
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.published import whereabouts

from dropforge.settings import from_env
from dropforge.stages import NOTHING_NEW
from dropforge_airflow import connection, lineage
from dropforge_airflow.links import DatasetCardLink
from dropforge_airflow.tasks import bundle, confirm, data, meter, run
from dropforge_airflow.tasks.failure import no_retry

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubeflow_training.gangs.reattach import Identity
    from kubeflow_training.jobs.observation import Observation
    from kubeflow_training.jobs.waiting.limits import Limits


class CurateOperator(PyTorchJobOperator):
    """Make the dataset version of a plan, where its recipe says.

    With `curation.spark.cluster` that is a SparkApplication or a driver's Job, and everything that holds for the jobs
    of `PyTorchJobOperator` holds for it: logs in the task's log, a kill that deletes it, a retry that finds it again.

    :param planned: what task `plan` returned; templated.
    """

    template_fields: Sequence[str] = ("planned", *PyTorchJobOperator.template_fields)
    operator_extra_links = (*PyTorchJobOperator.operator_extra_links, DatasetCardLink())

    def __init__(self, *, planned: Any, **kwargs: Any) -> None:
        super().__init__(backend="kubernetes", log_ranks="first", **kwargs)
        self.planned = planned

    def execute(self, context: Context) -> Any:
        self._name_rows()
        self.manifest = data.cluster_job(self.planned)
        if self.manifest is None:
            return data.curate(self.planned)
        with self._divided():
            super().execute(context)
        return data.from_cluster(self.planned)

    def resume(self, context: Context, event: Mapping[str, Any]) -> Any:
        self._name_rows()
        with self._divided():
            super().resume(context, event)
        return data.from_cluster(self.planned)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        # A broken trigger begins anew in another process, which needs the manifest.
        with self.own_failures(context):
            self.manifest = data.cluster_job(self.planned)
        return super().resume_execution(next_method, next_kwargs, context)

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """Divide a batch whose data the job has refused."""
        try:
            yield
        except JobFailedForGood as error:
            if error.observation is not None and error.observation.reason is Reason.BAD_DATA:
                data.refused_on_cluster(self.planned, str(error))
            raise

    def _name_rows(self) -> None:
        """First, so that also a curation that fails has named them."""
        lineage.tell(lambda: lineage.curating(self.planned, from_env().root))


class OpenRunOperator(BaseOperator):
    """Open the run; its MLflow run is linked from then on, minutes before the first job.

    :param planned, curated: what these tasks returned. :param forecast: what `check_data` foresaw. All are templated.
    """

    template_fields: Sequence[str] = ("planned", "curated", "forecast")
    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, *, planned: Any, curated: Any, forecast: Any, **kwargs: Any) -> None:
        super().__init__(multiple_outputs=True, **kwargs)
        self.planned, self.curated, self.forecast = planned, curated, forecast

    def execute(self, context: Context) -> dict[str, Any]:
        key = getattr(context["dag_run"], "partition_key", None)
        try:
            opened = run.open_run(self.planned, self.curated, context["run_id"], self.forecast, key, context["ti"])
        except run.NothingNew as error:
            told = {NOTHING_NEW: {**asdict(error.found), "told": str(error)}, MLFLOW_LINK_KEY: error.page}
            for name, value in {**told, "mlflow_url": error.page}.items():
                context["ti"].xcom_push(key=name, value=value)
            raise
        context["ti"].xcom_push(key=MLFLOW_LINK_KEY, value=opened["mlflow_url"])
        return dict(opened)


class MeteredJobOperator(PyTorchJobOperator):
    """A job of a run, whose hours are written down and end it at the recipe's `compute.limits.stop_above`.

    The limit is over all attempts and jobs of the run: a gang gets the time that is left, is then asked to stop, which
    a training does after a checkpoint, and no other gang follows.
    """

    @cached_property
    def _meter(self) -> meter.Meter:
        """Of this task's job, once its manifest is rendered."""
        with no_retry():
            return meter.Meter.of(self.manifest)

    def execute(self, context: Context) -> dict[str, Any]:
        if told := self._meter.used_up():
            raise AirflowFailException(told)
        confirm.require_word(connection.open_store(from_env().bucket), self._meter.spec)
        return super().execute(context)

    def gang_ended(self, job: Mapping[str, Any], seen: Observation) -> None:
        try:
            self._meter.ended(job, seen)
        except Exception as error:  # a store that is away says nothing about the job; `close_run` counts it again
            self.log.warning("the end of job %s could not be written down: %r", job["name"], error)
        if seen.phase is Phase.FAILED:
            self._keep_bundle(job, seen)

    def _keep_bundle(self, job: Mapping[str, Any], seen: Observation) -> None:
        try:
            spec, backend = (
                self._meter.spec,
                self.hook(str(job.get("kind") or "PyTorchJob"), job.get("backend")).connect(),
            )
            if where := bundle.keep(connection.open_store(from_env().bucket), spec, job, seen, backend):
                self.log.info("What the cluster said of this failure is kept: %s", where)
                bundle.link(spec, job, seen, where, self._meter.failed())
        except Exception as error:  # it is no part of the run
            self.log.warning("what the cluster said of job %s could not be kept: %r", job["name"], error)

    def _publish(self, context: Context, manifest: Mapping[str, Any], job: Identity) -> None:
        super()._publish(context, manifest, job)
        self._meter.began(whereabouts(job), Memory(context).size(job))

    def _limits(self, context: Context, job: Identity) -> Limits:
        self.queue_timeout, self.min_nodes = self._meter.queue_timeout, self._meter.min_nodes
        found, left = super()._limits(context, job), self._meter.left(job.uid)
        if left is None:
            return found
        own = [found.run_seconds] if found.run_seconds is not None else []
        return replace(found, run_seconds=min([*own, max(1.0, left)]))

    def _too_long(self, context: Context, job: Mapping[str, Any], seen: Observation | None, why: str) -> NoReturn:
        try:
            super()._too_long(context, job, seen, why)
        except AirflowTaskTimeout:
            self._meter.ended(job, seen)
            if told := self._meter.used_up():
                raise JobFailedForGood(told) from None
            raise


class OptionalJobOperator(MeteredJobOperator):
    """A job of a run that succeeds at once if its manifest is empty: a skipped task would read as a kill."""

    def execute(self, context: Context) -> dict[str, Any]:
        if not self.manifest:
            self.log.info("There is nothing to do: the recipe asks for no such job, or the model is there already")
            return {}
        return super().execute(context)


class TrainOperator(OptionalJobOperator):
    """The job that trains, which names what it reads and makes."""

    def execute(self, context: Context) -> dict[str, Any]:
        if not self.manifest:
            return super().execute(context)
        return self._named(super().execute, context)

    def resume(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        return self._named(super().resume, context, event)

    def _named(self, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        lineage.tell(lambda: lineage.training(self._meter.spec))
        found = work(*arguments)
        lineage.tell(lambda: lineage.trained(self._meter.spec))
        return found
