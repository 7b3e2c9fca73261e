"""Links from the pipeline's tasks to what they made: the dataset card, the verdict, the registered version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from kubeflow_training.links import PublishedLink

from dropforge.mlflow_pages import artifact_page, version_page

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


def airflow_url() -> str:
    """The address of Airflow's pages; empty if it is not set."""
    from airflow.sdk.configuration import conf

    return str(conf.get("api", "base_url", fallback="") or "").rstrip("/")


class _Link(PublishedLink):
    """A link that the worker makes at the task's end, and Airflow keeps under `key`; empty if there is nothing."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom

        made = XCom.get_value(ti_key=ti_key, key="return_value")
        return self.address(operator, made) if isinstance(made, dict) else ""

    def address(self, task: Any, made: dict[str, Any]) -> str:
        """:param task: with its arguments rendered. :param made: what the task returned."""
        raise NotImplementedError


class DatasetCardLink(_Link):
    """The card of the dataset version that `curate` made, served by Dropforge's pages in Airflow."""

    title, key = "Dataset card", "dropforge_dataset_card_link"

    def address(self, task: Any, made: dict[str, Any]) -> str:
        asked = urlencode({"family": task.planned["family"], "digest": made["digest"]})
        return f"{airflow_url()}/dropforge/dags/{task.dag_id}/card?{asked}"


class VerdictLink(_Link):
    """The verdict of `decide`, as MLflow keeps it beside the run."""

    title, key = "Verdict", "dropforge_verdict_link"

    def address(self, task: Any, made: dict[str, Any]) -> str:  # noqa: ARG002 - those of all links
        return artifact_page(task.op_args[0]["mlflow_url"], "verdict.md")


class ModelVersionLink(_Link):
    """The version that `register` made."""

    title, key = "Model version", "dropforge_model_version_link"

    def address(self, task: Any, made: dict[str, Any]) -> str:
        from dropforge.settings import from_env

        return version_page(from_env().tracking_uri, task.op_args[0]["family"], made["version"])


class OpenedRunLink(PublishedLink):
    """The MLflow run of the task's first argument."""

    title, key = "MLflow run", "dropforge_mlflow_run_link"

    def get_link(self, operator: Any, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        opened = operator.op_args[0]
        return str(opened["mlflow_url"]) if isinstance(opened, dict) else ""
