"""Waiting for a job that the operator did not start."""

from __future__ import annotations

from airflow.sdk import DAG, task

from kubeflow_training.sensors import PyTorchJobSensor

with DAG("example_pytorch_job_sensor", schedule=None):

    @task
    def somebody_submits(run: str) -> str:
        from kubeflow_training.hooks import PyTorchJobHook
        from kubeflow_training.jobs.manifest import made_name, pytorch_job

        name = made_name("theirs", run, 40)
        command = ["python", "-c", "print('theirs')"]
        manifest = pytorch_job(name=name, image="none", command=command, cpus=0.5, memory_gb=0.5)
        PyTorchJobHook("local").connect().create(manifest)
        return name

    name = somebody_submits("{{ run_id }}")

    # [START howto_sensor]
    PyTorchJobSensor(
        task_id="wait",
        name="{{ ti.xcom_pull('somebody_submits') }}",
        namespace="default",
        backend="local",
        must_exist=True,
        poke_interval=1,
        timeout=600,
    ).set_upstream(name)
    # [END howto_sensor]

    # [START howto_sensor_sync]
    PyTorchJobSensor(
        task_id="wait_in_the_worker",
        name="{{ ti.xcom_pull('somebody_submits') }}",
        backend="local",
        deferrable=False,
        poke_interval=1,
        timeout=600,
    ).set_upstream(name)
    # [END howto_sensor_sync]
