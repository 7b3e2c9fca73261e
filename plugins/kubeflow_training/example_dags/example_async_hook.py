"""The calls for custom objects that the cncf-kubernetes provider's asynchronous hook lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.sdk import DAG, task

with DAG("example_async_hook", schedule=None, params={"namespace": "default", "image": "busybox:1.37"}):
    # [START howto_async_hook]
    async def train_and_watch(manifest: dict[str, Any]) -> list[str]:
        from kubeflow_training.hooks import AsyncPyTorchJobHook

        metadata, seen = manifest["metadata"], []
        async with AsyncPyTorchJobHook(kubernetes_conn_id="kubernetes_default") as hook:
            created = await hook.create(manifest)
            async for job in hook.watch(metadata["name"], metadata["namespace"]):
                conditions = ((job or {}).get("status") or {}).get("conditions") or []
                seen = [item["type"] for item in conditions]
                if job is None or {"Succeeded", "Failed"} & set(seen):
                    break
            await hook.delete(metadata["name"], metadata["namespace"], uid=created["metadata"]["uid"])
        return seen
        # [END howto_async_hook]

    @task
    def train(run: str, params: Any = None) -> list[str]:
        from kubeflow_training.jobs.manifest import made_name, pytorch_job

        return asyncio.run(
            train_and_watch(
                pytorch_job(
                    name=made_name("async", run, 40),
                    command=["sh", "-c", "echo done"],
                    cpus=0.1,
                    memory_gb=0.1,
                    image_pull_policy="IfNotPresent",
                    **params,
                )
            )
        )

    train("{{ run_id }}")
