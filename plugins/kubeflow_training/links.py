"""Links from the task to its job's page, its pods' logs and its MLflow run, there as soon as the job is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

LINK_KEY: Final = "pytorch_job_link"
LOGS_LINK_KEY: Final = "pytorch_job_logs_link"
MLFLOW_LINK_KEY: Final = "pytorch_job_mlflow_link"
JOB_URL_VARIABLE: Final = "KUBEFLOW_TRAINING_JOB_URL"
LOGS_URL_VARIABLE: Final = "KUBEFLOW_TRAINING_LOGS_URL"
MLFLOW_URL_VARIABLE: Final = "KUBEFLOW_TRAINING_MLFLOW_URL"


class PublishedLink(BaseOperatorLink):
    """A link whose address the operator publishes under `xcom_key`."""

    title: ClassVar[str]
    key: ClassVar[str]

    @property
    def name(self) -> str:
        return self.title

    @property
    def xcom_key(self) -> str:
        return self.key

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        # Airflow writes the answer over what was published, so it must be the same: with the gang's own name.
        from airflow.sdk.execution_time.xcom import XCom

        return str(XCom.get_value(ti_key=ti_key, key=self.xcom_key) or "")


class PyTorchJobLink(PublishedLink):
    """The job's page: `job_url` of the operator or `KUBEFLOW_TRAINING_JOB_URL`."""

    title, key = "Job", LINK_KEY


class PodLogsLink(PublishedLink):
    """The logs of the job's pods: `logs_url` of the operator or `KUBEFLOW_TRAINING_LOGS_URL`."""

    title, key = "Pod logs", LOGS_LINK_KEY


class MlflowRunLink(PublishedLink):
    """The job's MLflow run: `mlflow_url` of the operator or `KUBEFLOW_TRAINING_MLFLOW_URL`."""

    title, key = "MLflow run", MLFLOW_LINK_KEY


def addresses(templates: Mapping[str, str | None], values: Mapping[str, Any]) -> dict[str, str]:
    """The addresses that there are, by XCom key.

    :param templates: by "job", "logs" and "mlflow".
    :param values: of the job, see `link`.
    """
    found = {
        LINK_KEY: link(templates.get("job"), JOB_URL_VARIABLE, values),
        LOGS_LINK_KEY: link(templates.get("logs"), LOGS_URL_VARIABLE, values),
        MLFLOW_LINK_KEY: link(templates.get("mlflow"), MLFLOW_URL_VARIABLE, values),
    }
    return {key: url for key, url in found.items() if url}


def link(template: str | None, variable: str, values: Mapping[str, Any]) -> str:
    """An address from a template with $name, $namespace, $uid, $gang and $run; empty if it is no web address.

    :param template: else the environment's `variable` is one.
    :param values: what to fill in; a template that needs a value that is empty gives no address.
    """
    template = template or os.environ.get(variable) or ""
    filled = {key: quote(str(value), safe="") for key, value in values.items() if value not in (None, "")}
    try:
        url = Template(template).substitute(filled)
    except (KeyError, ValueError):
        return ""
    return url if urlsplit(url).scheme in ("http", "https") else ""
