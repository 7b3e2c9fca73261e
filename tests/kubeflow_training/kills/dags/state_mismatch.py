"""Tasks that wait, one in each DAG, for `test_state_mismatch.py`; what they wait for comes from the run's conf."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow.asking import AskPersonOperator, Question
from dropforge_airflow.starting import AwaitRunOperator, LateOperator
from dropforge_airflow.trials import TrialOperator
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.retries import RetryBudget
from kubeflow_training.sensors import PyTorchJobSensor

AGAIN = {"retries": 3, "retry_delay": timedelta(seconds=0.1), "retry_policy": RetryBudget(1)}
TEMPLATES = {"schedule": None, "render_template_as_native_obj": True}
CONF = "{{{{ dag_run.conf[{!r}] }}}}"


class Asker(AskPersonOperator):
    """Keeps nothing but its log, and is not away."""

    def question(self):
        return Question("Well?", "A question.", "this", yes=False, deadline_hours=1)

    def tell(self, text):
        self.log.info("shown: %s", text)

    def take(self, *, yes, by, at):
        self.log.info("taken: %s", "yes" if yes else "no")
        return f"{by} said {'yes' if yes else 'no'}"


class Trial(TrialOperator):
    """A trial of no sweep: its run's id is the conf's."""

    template_fields = ("run", "conf")

    def _stopped(self):
        return None


with DAG("late_job", **TEMPLATES):
    PyTorchJobOperator(
        task_id="work",
        manifest=CONF.format("manifest"),
        backend=CONF.format("backend"),
        poll_interval=0.2,
        keep_failed=True,
        **AGAIN,
    )
with DAG("late_sensor", **TEMPLATES):
    PyTorchJobSensor(
        task_id="work", name=CONF.format("job"), backend=CONF.format("backend"), poke_interval=0.2, **AGAIN
    )
with DAG("late_await", **TEMPLATES):
    AwaitRunOperator(task_id="work", awaited="awaited", run=CONF.format("run"), **AGAIN)
with DAG("late_alarm", **TEMPLATES):
    since, limit = "{{ dag_run.conf['since'] }}", "{{ dag_run.conf['limit'] }}"
    LateOperator(
        task_id="work", awaited="awaited", run=CONF.format("run"), since=since, limit=limit, told="so long", **AGAIN
    )
with DAG("late_trial", **TEMPLATES):
    Trial(task_id="work", awaited="awaited", run=CONF.format("run"), conf=CONF.format("conf"), **AGAIN)
with DAG("late_question", **TEMPLATES):
    Asker(task_id="work", opened={}, subject="Well?", yes="Yes", no="No", **AGAIN)


with DAG("awaited", schedule=None):

    @task(retries=0)
    def wait(dag_run=None):
        """End as a file says, once it is there."""
        file = Path(dag_run.conf["file"])
        while not file.exists():
            time.sleep(0.1)
        if file.read_text() == "failed":
            raise AirflowFailException("as it was asked to")

    wait()
