"""Tasks whose gang starts again with the nodes there are."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.retries import RetryByCause

POLICY = RetryByCause()

for deferrable in (True, False):
    with DAG("deferred_smaller" if deferrable else "sync_smaller", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(
            task_id="train",
            manifest="{{ dag_run.conf['manifest'] }}",
            backend="{{ dag_run.conf['backend'] }}",
            kubernetes_conn_id="kubernetes_other",
            poll_interval=0.1,
            deferrable=deferrable,
            queue_timeout=timedelta(seconds=8),  # a gang that fits has to start within it, on a busy machine too
            min_nodes=2,
            retries=POLICY.retries,
            retry_policy=POLICY,
        )
