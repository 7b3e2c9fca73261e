"""Tasks of the cncf-kubernetes provider's job operator for `bench.resume`."""

from __future__ import annotations

from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.sdk import DAG
from noting import NAMESPACE, SELECTOR, TASKS, TOLERATIONS, Noting


class Noted(Noting, KubernetesJobOperator):
    pass


for dag_id, more in {"job": {}, "job-2s": {"job_poll_interval": 2}}.items():
    with DAG(dag_id, schedule=None):
        Noted.partial(
            task_id="train",
            namespace=NAMESPACE,
            image="none",
            cmds=["true"],
            node_selector=SELECTOR,
            tolerations=TOLERATIONS,
            random_name_suffix=False,
            get_logs=False,
            backoff_limit=0,
            parallelism=1,
            wait_until_job_complete=True,
            # It asks without a pause between; a busy controller takes longer than three requests.
            discover_pods_retry_number=1000,
            deferrable=True,
            **more,
        ).expand(name=[f"{dag_id}-{number}" for number in TASKS])
