"""What is told as soon as a job exists: where it is, its links, and what starts the training of a held gang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kubeflow_training.gangs.reattach import Identity
from kubeflow_training.jobs.manifest.experiments import launch_lines
from kubeflow_training.jobs.manifest.words import MLFLOW_RUN_ANNOTATION
from kubeflow_training.links import addresses

if TYPE_CHECKING:
    from airflow.sdk import Context

JOB_KEY: Final = "pytorch_job"
"""XCom with the job's name, namespace, uid, gang, kind and backend, pushed as soon as the job exists."""


def whereabouts(job: Identity) -> dict[str, Any]:
    """What triggers, results and XCom know of a job."""
    values = job.to_dict()
    return {key: values.get(key) for key in ("name", "namespace", "uid", "gang", "kind", "backend", "created")}


def publish(task: Any, context: Context, manifest: Mapping[str, Any], job: Identity) -> None:
    """Push the job's XCom and links, and log how a held gang is started.

    :param task: the operator, with its addresses, `mlflow_run` and `hold`.
    """
    ti = context["ti"]
    if task.do_xcom_push:
        value = {**whereabouts(job), "kind": manifest["kind"], "backend": task.backend}
        ti.xcom_push(key=JOB_KEY, value=value)
    urls = {"job": task.job_url, "logs": task.logs_url, "mlflow": task.mlflow_url}
    notes = manifest["metadata"].get("annotations") or {}
    values = {**whereabouts(job), "run": task.mlflow_run or notes.get(MLFLOW_RUN_ANNOTATION)}
    for key, url in addresses(urls, values).items():
        ti.xcom_push(key=key, value=url)
    if task.hold:
        task.log.info("The pods are held. What starts the training in each pod, and what ends the hold:")
        named = {**manifest, "metadata": {**manifest["metadata"], "name": job.name}}
        for line in launch_lines(named):
            task.log.info("    %s", line)
