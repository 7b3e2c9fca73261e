"""Tasks of the cncf-kubernetes provider's pod operator for `bench.resume`."""

from __future__ import annotations

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import DAG
from noting import NAMESPACE, SELECTOR, TASKS, TOLERATIONS, Noting


class Noted(Noting, KubernetesPodOperator):
    pass


with DAG("pod", schedule=None):
    Noted.partial(
        task_id="train",
        namespace=NAMESPACE,
        image="none",
        cmds=["true"],
        node_selector=SELECTOR,
        tolerations=TOLERATIONS,
        random_name_suffix=False,
        get_logs=False,
        deferrable=True,
    ).expand(name=[f"pod-{number}" for number in TASKS])
