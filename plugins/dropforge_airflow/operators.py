"""Operators of the fine-tune DAG: curation here or as a job on Kubernetes, and a job that a recipe may leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kubeflow_training.operators import PyTorchJobOperator

from dropforge_airflow.tasks import data

if TYPE_CHECKING:
    from airflow.sdk import Context


class CurateOperator(PyTorchJobOperator):
    """Make the dataset version of a plan, where its recipe says.

    With `curation.spark.cluster` that is a SparkApplication or a driver's Job, and everything that holds for the jobs
    of `PyTorchJobOperator` holds for it: logs in the task's log, a kill that deletes it, a retry that finds it again.

    :param planned: what task `plan` returned; templated.
    """

    template_fields: Sequence[str] = ("planned", *PyTorchJobOperator.template_fields)

    def __init__(self, *, planned: Any, **kwargs: Any) -> None:
        super().__init__(backend="kubernetes", log_ranks="first", **kwargs)
        self.planned = planned

    def execute(self, context: Context) -> Any:
        self.manifest = data.cluster_job(self.planned)
        if self.manifest is None:
            return data.curate(self.planned)
        super().execute(context)
        return data.from_cluster(self.planned)

    def resume(self, context: Context, event: Mapping[str, Any]) -> Any:
        super().resume(context, event)
        return data.from_cluster(self.planned)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        # A broken trigger begins anew in another process, which needs the manifest.
        self.manifest = data.cluster_job(self.planned)
        return super().resume_execution(next_method, next_kwargs, context)


class OptionalJobOperator(PyTorchJobOperator):
    """A `PyTorchJobOperator` that succeeds at once if its manifest is empty: a skipped task would read as a kill."""

    def execute(self, context: Context) -> dict[str, Any]:
        if not self.manifest:
            self.log.info("The recipe asks for no such job")
            return {}
        return super().execute(context)
