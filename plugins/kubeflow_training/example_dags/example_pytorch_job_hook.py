"""Jobs from Python code, without the operator."""

from __future__ import annotations

from airflow.sdk import DAG, task

with DAG("example_pytorch_job_hook", schedule=None):

    @task
    def sweep(run: str) -> str:
        # [START howto_hook]
        import time

        from kubeflow_training.hooks import PyTorchJobHook
        from kubeflow_training.jobs.manifest import made_name, pytorch_job
        from kubeflow_training.jobs.observation import observe

        cluster = PyTorchJobHook("local").connect()
        name = made_name("from-the-hook", run, 40)
        command = ["python", "-c", "print('done')"]
        job = cluster.create(pytorch_job(name=name, image="none", command=command, cpus=0.5, memory_gb=0.5))
        while not (seen := observe(job.job, job.pods, job.events)).ended:
            time.sleep(0.5)
            if (found := cluster.read(name, "default")) is None:
                raise RuntimeError("the job was deleted from outside")
            job = found
        lines = cluster.tail(job.pods[0])
        cluster.delete(name, "default", uid=job.uid)
        # [END howto_hook]
        return f"{seen.phase}: {lines}"

    sweep("{{ run_id }}")
