"""One training task each; its manifest comes from the run's conf."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from kubeflow_training.operators import PyTorchJobOperator

JOB = {
    "task_id": "train",
    "manifest": "{{ dag_run.conf['manifest'] }}",
    "backend": "{{ dag_run.conf['backend'] }}",
    "poll_interval": 0.2,
}
SOON, LATER = timedelta(seconds=0.1), timedelta(seconds=7)


class Held(PyTorchJobOperator):
    """Stays in `execute`, between create and deferral, until the file of the run's conf is there or it is stopped."""

    def _publish(self, context, manifest, job):
        super()._publish(context, manifest, job)
        while not Path(context["dag_run"].conf["hold"]).exists() and not self._killed:
            time.sleep(0.05)


for mode in ("deferred", "sync"):
    deferrable = mode == "deferred"
    more = {"deferrable": deferrable, **JOB}
    with DAG(mode, schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(retries=3, retry_delay=SOON, **more)
    with DAG(f"{mode}_held", schedule=None, render_template_as_native_obj=True):
        Held(retries=3, retry_delay=SOON, **more)
    # While the API server is away, tries that follow one another at once would all be lost.
    with DAG(f"{mode}_patient", schedule=None, render_template_as_native_obj=True):
        Held(retries=3, retry_delay=LATER, **more)
    with DAG(f"{mode}_once", schedule=None, render_template_as_native_obj=True):
        PyTorchJobOperator(retries=0, **more)
