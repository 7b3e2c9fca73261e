"""Tasks that retry by cause, with small budgets."""

from __future__ import annotations

from airflow.sdk import DAG, task
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.retries import RetryByCause, SharedBudget

JOB = {"manifest": "{{ dag_run.conf['manifest'] }}", "backend": "{{ dag_run.conf['backend'] }}", "poll_interval": 0.1}
POLICY = RetryByCause({"preempted": 2, "collective timeout": 1, "unknown": 1})

for deferrable in (True, False):
    with DAG("deferred_by_cause" if deferrable else "sync_by_cause", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(task_id="train", retries=POLICY.retries, retry_policy=POLICY, deferrable=deferrable, **JOB)

SHARED = RetryByCause({"preempted": 3}, shared=SharedBudget("plan", "retries", at_most=3, name="compute.retries"))

with DAG("shared_budget", schedule=None, render_template_as_native_obj=True):

    @task(multiple_outputs=True)
    def plan():
        return {"retries": 0}

    plan() >> PyTorchJobOperator(task_id="train", retries=SHARED.retries, retry_policy=SHARED, **JOB)
