"""A sensor that asks from a worker and keeps in mind what it saw."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import shutil
from pathlib import Path
from kubeflow_training.exceptions import JobFailedForGood
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.sensors import PyTorchJobSensor

home = Path("cluster").absolute()
sensor = PyTorchJobSensor(task_id="wait", name="job", backend="local", home=str(home), deferrable=False)
assert sensor.poke({}) is False, "a job that does not exist yet is waited for"
LocalCluster(home).create(pytorch_job(name="job", image="none", command=["true"]))
assert sensor.poke({}) is False
shutil.rmtree(home / "jobs/default/job")
try:
    sensor.poke({})
except JobFailedForGood as error:
    assert error.observation.phase is Phase.LOST, error.observation
    assert error.job["name"] == "job"
else:
    raise AssertionError("a job that was there and is gone is waited for")
"""


def test_a_job_that_is_deleted_from_outside_is_not_waited_for(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command,
        env={**env, "AIRFLOW_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
