"""DAGs with the operator's options: templates, files, what is kept, what is held."""

from __future__ import annotations

from airflow.sdk import DAG
from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

MANIFEST = "{{ dag_run.conf['manifest'] }}"
JOB = {"backend": "{{ dag_run.conf.get('backend', 'local') }}", "poll_interval": 0.1}
URLS = {
    "job_url": "http://jobs/$namespace/$name",
    "logs_url": "http://logs/$name?uid=$uid",
    "mlflow_url": "http://mlflow/#/runs/$run",
}

for deferrable in (True, False):
    mode = "deferred" if deferrable else "sync"
    more = {"deferrable": deferrable, **JOB}
    with DAG(f"{mode}_spec", schedule=None, params={"nodes": 2}):
        PyTorchJobOperator(
            task_id="train",
            spec=TrainingJobSpec(
                image="{{ dag_run.conf['image'] }}",
                command=["python", "-c", "{{ dag_run.conf['script'] }}", "config.yaml", "{{ run_id }}.json"],
                nodes="{{ params.nodes }}",
                cpus=0.5,
                memory_gb=0.2,
                env={"RUN": "{{ run_id }}"},
                mlflow_run="run-of-{{ run_id }}",
                grace_seconds=2,
            ),
            **URLS,
            **more,
        )
    with DAG(f"{mode}_file", schedule=None):
        PyTorchJobOperator(task_id="train", manifest="job.yaml", **more)
    with DAG(f"{mode}_tidy", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(
            task_id="train", manifest=MANIFEST, on_finish="delete_succeeded", do_xcom_push=False, **URLS, **more
        )
    with DAG(f"{mode}_held", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(task_id="train", manifest=MANIFEST, hold=True, **more)
    with DAG(f"{mode}_kept", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(task_id="train", manifest=MANIFEST, keep_failed=True, retries=3, **more)
    with DAG(f"{mode}_other", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(
            task_id="train",
            manifest=MANIFEST,
            backend="kubernetes",
            kubernetes_conn_id="kubernetes_other",
            poll_interval=0.5,
            deferrable=deferrable,
            retries=3,
        )
    with DAG(f"{mode}_held_there", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(task_id="train", manifest=MANIFEST, backend="kubernetes", hold=True, deferrable=deferrable)
