"""DAGs of the tests: one training task each, its manifest from the run's conf."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.sensors import PyTorchJobSensor

MANIFEST = "{{ dag_run.conf['manifest'] }}"
JOB = {
    "backend": "{{ dag_run.conf.get('backend', 'local') }}",
    "poll_interval": 0.1,
    "job_url": "http://127.0.0.1/jobs/$namespace/$name",
}

for deferrable in (True, False):
    name = "deferred" if deferrable else "sync"
    with DAG(name, schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(task_id="train", manifest=MANIFEST, deferrable=deferrable, retries=3, **JOB)
    with DAG(f"{name}_impatient", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(
            task_id="train",
            manifest=MANIFEST,
            deferrable=deferrable,
            execution_timeout=timedelta(seconds=2),
            retries=1,
            **JOB,
        )
    with DAG(f"{name}_sensor", schedule=None):
        PyTorchJobSensor(
            task_id="train", name="job", backend="local", poke_interval=0.2, timeout=20, deferrable=deferrable
        )
    with DAG(f"{name}_impatient_sensor", schedule=None):
        PyTorchJobSensor(
            task_id="train",
            name="job",
            backend="local",
            poke_interval=0.2,
            timeout=60,
            execution_timeout=timedelta(seconds=2),
            retries=1,
            deferrable=deferrable,
        )

with DAG("piped", schedule=None, render_template_as_native_obj=True):

    @task
    def plan(manifest):
        return manifest

    PyTorchJobOperator(task_id="train", manifest=plan(MANIFEST), deferrable=True, **JOB)
