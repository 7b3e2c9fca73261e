"""A task without retries, and the reaper."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.reaper import JobReaperOperator

with DAG("once", schedule=None, render_template_as_native_obj=True):
    PyTorchJobOperator(
        task_id="train",
        manifest="{{ dag_run.conf['manifest'] }}",
        backend="{{ dag_run.conf['backend'] }}",
        kubernetes_conn_id="restricted",
        deferrable=False,
        poll_interval=0.1,
        retries=0,
    )

with DAG("reaping", schedule=None, render_template_as_native_obj=True):
    JobReaperOperator(
        task_id="train",  # the name that the tests' driver looks for
        backend="{{ dag_run.conf['backend'] }}",
        namespaces="{{ dag_run.conf['namespaces'] }}",
        kubernetes_conn_id="restricted",
        grace=timedelta(seconds=1),
    )
