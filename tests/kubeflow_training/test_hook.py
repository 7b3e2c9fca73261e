"""The asynchronous hook on a real cluster, with an Airflow connection and the rights that the package ships."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid

import pytest

SCRIPT = """
import asyncio, json, sys
from kubeflow_training.hooks import AsyncPyTorchJobHook
from kubeflow_training.jobs.errors import JobError, JobExistsError, JobRefusedError

manifest, found = json.loads(sys.argv[1]), {}
name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]

async def main():
    async with AsyncPyTorchJobHook() as hook:
        found["before"] = await hook.get(name, namespace)
        made = await hook.create(manifest)
        try:
            await hook.create(manifest)
        except JobExistsError as error:
            found["twice"] = str(error)
        try:
            await hook.create(manifest | {"metadata": {"name": "x", "namespace": "no-such-namespace"}})
        except JobError as error:
            found["nowhere"] = type(error).__name__
        found["same"] = (await hook.get(name, namespace))["metadata"]["uid"] == made["metadata"]["uid"]
        found["listed"] = [job["metadata"]["name"] async for job in hook.list(namespace, labels={"test": name})]
        found["other"] = [job["metadata"]["name"] async for job in hook.list(namespace, labels={"test": "no"})]
        found["phases"], deleted = [], False
        async for job in hook.watch(name, namespace):
            if job is None:
                found["phases"].append(None)
                break
            words = {item["type"] for item in job.get("status", {}).get("conditions", []) if item["status"] == "True"}
            found["phases"] += [word for word in ("Created", "Running") if word in words - set(found["phases"])]
            if "Running" in words and not deleted:
                deleted = True
                found["wrong uid"] = await hook.delete(name, namespace, uid="00000000-0000-0000-0000-000000000000")
                found["deleted"] = await hook.delete(name, namespace, uid=made["metadata"]["uid"])
        found["again"] = await hook.delete(name, namespace)

asyncio.run(asyncio.wait_for(main(), 60))
print(json.dumps(found))
"""


@pytest.mark.cluster
def test_the_calls_that_the_kubernetes_hook_lacks(rights, tmp_path):
    from kubeflow_training.jobs.manifest import pytorch_job

    from tests.kubeflow_training.situations import PRETEND

    name = f"hook-{uuid.uuid4().hex[:8]}"
    values = {"namespace": rights.namespace, "image": "none", "command": ["true"], "cpus": 0.1, **PRETEND}
    manifest = pytorch_job(name=name, labels={"test": name}, **values)
    extra = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(rights.kubeconfig)}}
    env = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW") and key != "KUBECONFIG"}
    env |= {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(extra)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(manifest)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert name in found.pop("twice")
    assert found == {
        "before": None,
        "nowhere": "JobForbiddenError",
        "same": True,
        "listed": [name],
        "other": [],
        "phases": ["Created", "Running", None],
        "wrong uid": False,
        "deleted": True,
        "again": False,
    }


def test_an_indexed_job_is_created_together_with_its_service(monkeypatch):
    from kubeflow_training.hooks import AsyncPyTorchJobHook
    from kubeflow_training.jobs.backend import Snapshot
    from kubeflow_training.jobs.kinds.compile import indexed_job

    manifest, made = indexed_job(name="job", image="x", command=["true"], nodes=2), []

    class Cluster:
        """The one that makes both."""

        def create(self, given):
            made.append(given)
            return Snapshot({**given, "metadata": {**given["metadata"], "uid": "u"}})

    async def main():
        async with AsyncPyTorchJobHook(kind="Job") as hook:
            monkeypatch.setattr(hook._hook, "connect", Cluster)
            return await hook.create(manifest)

    assert asyncio.run(main())["metadata"]["uid"] == "u"
    assert made == [manifest]
