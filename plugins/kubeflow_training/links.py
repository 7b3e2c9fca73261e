"""A link from the task to its job's page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

LINK_KEY: Final = "pytorch_job_link"
JOB_URL_VARIABLE: Final = "KUBEFLOW_TRAINING_JOB_URL"


class PyTorchJobLink(BaseOperatorLink):
    """The job's page. Its address is published as soon as the job exists.

    The address is `job_url` of the operator or `KUBEFLOW_TRAINING_JOB_URL`, with $namespace and $name in it.
    """

    @property
    def name(self) -> str:
        return "Job"

    @property
    def xcom_key(self) -> str:
        return LINK_KEY

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        manifest = getattr(operator, "manifest", None)
        metadata = (manifest.get("metadata") or {}) if isinstance(manifest, Mapping) else {}
        return job_link(getattr(operator, "job_url", None), metadata)


def job_link(template: str | None, metadata: Mapping[str, Any]) -> str:
    """The address of a job's page; empty without a template, or if the result is no web address."""
    template = template or os.environ.get(JOB_URL_VARIABLE) or ""
    values = {key: quote(str(metadata.get(key) or ""), safe="") for key in ("namespace", "name")}
    url = Template(template).safe_substitute(values) if values["name"] else ""
    return url if urlsplit(url).scheme in ("http", "https") else ""
