"""An operator whose process dies by SIGKILL at the step that the run's conf names, once."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from kubeflow_training.gangs.memory import Memory
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.operators import PyTorchJobOperator


class Death:
    def __init__(self, context):
        conf = context["dag_run"].conf
        self.step, self.flag = conf.get("die"), Path(conf.get("died", "/nowhere"))

    def comes(self, step):
        if step != self.step or self.flag.exists():
            return False
        self.flag.touch()
        return True

    def at(self, step):
        if self.comes(step):
            os.kill(os.getpid(), signal.SIGKILL)


class MortalMemory(Memory):
    def __init__(self, context, death):
        super().__init__(context)
        self.death = death

    @property
    def job(self):
        return super().job

    @job.setter
    def job(self, job):
        what = "uid" if job.uid else "identity"
        self.death.at(f"before the {what} is stored")
        Memory.job.fset(self, job)
        self.death.at(f"after the {what} is stored")


class MortalBackend:
    def __init__(self, backend, death):
        self.backend, self.death = backend, death

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def create(self, manifest):
        found = self.backend.create(manifest)
        self.death.at("after the create")
        if self.death.comes("the create's answer hangs"):
            time.sleep(60)
        if self.death.comes("the create's answer is lost"):
            raise BackendUnavailableError("the API", "it went away", "It is tried again")
        return found

    def delete(self, *arguments, **more):
        found = self.backend.delete(*arguments, **more)
        self.death.at("after the old gang is deleted")
        return found


class Mortal(PyTorchJobOperator):
    def _gangs(self, context, manifest):
        gangs, death = super()._gangs(context, manifest), Death(context)
        gangs.memory, gangs.backend = MortalMemory(context, death), MortalBackend(gangs.backend, death)
        return gangs

    def _publish(self, context, manifest, job):
        super()._publish(context, manifest, job)
        Death(context).at("after the links are published")

    def defer(self, **more):
        self.death.at("before the deferral")
        super().defer(**more)

    def execute(self, context):
        self.death = Death(context)
        return super().execute(context)


with DAG("mortal", schedule=None, render_template_as_native_obj=True):
    Mortal(
        task_id="train",
        manifest="{{ dag_run.conf['manifest'] }}",
        backend="{{ dag_run.conf.get('backend', 'local') }}",
        poll_interval=0.1,
        retries=3,
    )

with DAG("mortal_impatient", schedule=None, render_template_as_native_obj=True):
    Mortal(
        task_id="train",
        manifest="{{ dag_run.conf['manifest'] }}",
        backend="local",
        execution_timeout=timedelta(seconds=2),
        retries=0,
    )
