"""Waiting for many jobs in one triggerer loop: our trigger beside the cncf-kubernetes provider's own two.

    python -m bench.triggers [--jobs 40 --peers 20 --seconds 20]    # in full: --jobs 1000 --peers 200 --seconds 60

Needs KUBECONFIG with the training operator and pretend nodes (KWOK, labelled type=kwok, pods ended by the annotation
test.local/ends-after). Each contender waits in a process of its own, without tasks, with its own default arguments,
except that ours has log_ranks="none" and so reads no log: first while nothing happens, then while all of its jobs end.
Requests are those that aiohttp sends; a reference watcher in the same process (its own thread, its CPU not counted)
tells when the API told each end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from statistics import median
from typing import Annotated, Any

import typer

from bench.cluster import leave_out_without_cluster, reader

NAMES = {"ours": "PyTorchJobTrigger", "pod": "KubernetesPodTrigger", "job": "KubernetesJobTrigger"}
COLLECTIONS = {
    "ours": "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs",
    "pod": "/api/v1/namespaces/{}/pods",
    "job": "/apis/batch/v1/namespaces/{}/jobs",
}
ENDS = {"Succeeded", "Failed", "Complete"}
WARM = "warm"


def main(
    jobs: Annotated[int, typer.Option(help="Jobs of our trigger.", min=2)] = 40,
    peers: Annotated[int, typer.Option(help="Jobs of each peer.", min=2)] = 20,
    seconds: Annotated[float, typer.Option(help="How long nothing happens.", min=1)] = 20.0,
) -> None:
    """Wait for pretend jobs with each trigger, print what it takes."""
    leave_out_without_cluster()
    found = {}
    for who in NAMES:
        with _Stage(who, jobs if who == "ours" else peers) as stage:
            found[who] = stage.run(seconds)
    columns = (
        ("jobs", 6),
        ("missed", 8),
        ("requests", 10),
        ("CPU rest", 12),
        ("CPU all", 10),
        ("memory", 9),
        ("seen after", 18),
    )
    units = ("", 6), ("", 8), ("/job/min", 10), ("ms/job/min", 12), ("ms/job", 10), ("KB/job", 9), ("median, worst", 18)
    for row in (columns, units):
        print(" " * 22 + "".join(f"{word:>{width}}" for word, width in row))
    for who, it in found.items():
        print(
            f"{NAMES[who]:22}{it['jobs']:6}{it['missed']:8}{it['requests']:10.2f}{it['rest_ms']:12.1f}"
            f"{it['all_ms']:10.1f}{it['kb']:9.0f}{it['delay']:10.2f}{it['worst']:6.2f} s"
        )
    ours, pod = found["ours"], found["pod"]
    print(f"requests: {pod['requests'] / ours['requests']:.0f} times fewer than the pod trigger (bar 20)")
    print(f"CPU at rest: {pod['rest_ms'] / ours['rest_ms']:.0f} times less (bar 1),", end=" ")
    print(f"in all {pod['all_ms'] / ours['all_ms']:.1f} times")
    print(f"the loop stood still for {ours['blocked']:.2f} s, {ours['blocked_cpu']:.2f} s of it its own work (bar 0.2)")
    print(f"memory: {pod['kb'] / max(ours['kb'], 1):.1f} times less (bar 1)")
    print(f"seen {ours['worst']:.2f} s after the reference at worst (bar 0.5); missed {ours['missed']} (bar 0)")


class _Stage:
    """A namespace with pretend jobs of one contender."""

    def __init__(self, who: str, count: int) -> None:
        from kubernetes import client, config

        self.who, self.names = who, [f"{who}-{n}" for n in range(count)]
        self.namespace = f"bench-{who}-{uuid.uuid4().hex[:6]}"
        api = config.new_client_from_config()
        api.configuration.connection_pool_maxsize = 8
        self._core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._batch = client.BatchV1Api(api)

    def __enter__(self) -> _Stage:
        self._core.create_namespace({"metadata": {"name": self.namespace}})
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._create, [WARM, *self.names]))
        end = time.monotonic() + 60 + len(self.names)
        while sum(pod["status"]["phase"] == "Running" for pod in self._pods()) < len(self.names) + 1:
            if time.monotonic() > end:
                raise SystemExit(f"{self.who}: the pretend pods do not run; are there enough pretend nodes?")
            time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._core.delete_namespace(self.namespace)

    def run(self, seconds: float) -> dict[str, Any]:
        with reader("bench.triggers", self.who, self.namespace, str(seconds), *self.names) as process:
            assert process.stdout
            for line in process.stdout:
                if line == "end the warm one\n":
                    self._end([WARM])
                elif line == "end all\n":
                    self._end(self.names)
                elif line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            raise SystemExit(f"{self.who}: it ended without figures")

    def _create(self, name: str) -> None:
        from kubeflow_training.jobs.manifest import pytorch_job

        tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
        place: dict[str, Any] = {"node_selector": {"type": "kwok"}, "tolerations": tolerations}
        manifest = pytorch_job(
            name=name, namespace=self.namespace, image="none", command=["true"], cpus=0.01, memory_gb=0.01, **place
        )
        if self.who == "ours":
            self._custom.create_namespaced_custom_object("kubeflow.org", "v1", self.namespace, "pytorchjobs", manifest)
            return
        pod = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"] | {"restartPolicy": "Never"}
        if self.who == "pod":
            self._core.create_namespaced_pod(self.namespace, {"metadata": {"name": name}, "spec": pod})
        else:
            job = {"backoffLimit": 0, "template": {"spec": pod}}
            self._batch.create_namespaced_job(self.namespace, {"metadata": {"name": name}, "spec": job})

    def _end(self, names: list[str]) -> None:
        """Let the pods of these jobs end, a few at a time."""
        wanted = set(names)
        pods = []
        for pod in self._pods():
            labels = pod["metadata"].get("labels") or {}
            owner = labels.get("training.kubeflow.org/job-name") or labels.get("batch.kubernetes.io/job-name")
            if (owner or pod["metadata"]["name"]) in wanted:
                pods.append(pod["metadata"]["name"])
        body = {"metadata": {"annotations": {"test.local/ends-after": "1s"}}}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda pod: self._core.patch_namespaced_pod(pod, self.namespace, body), pods))

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self._core.list_namespaced_pod(self.namespace, _preload_content=False).data
        )["items"]
        return found


# In the process of one contender


def _trigger(who: str, name: str, namespace: str) -> Any:
    if who == "ours":
        from kubeflow_training.triggers import PyTorchJobTrigger

        return PyTorchJobTrigger(name=name, namespace=namespace, log_ranks="none")
    common: dict[str, Any] = {"base_container_name": "pytorch", "kubernetes_conn_id": "kubernetes_default"}
    if who == "pod":
        from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger

        return KubernetesPodTrigger(
            pod_name=name, pod_namespace=namespace, trigger_start_time=datetime.now(UTC), in_cluster=False, **common
        )
    from airflow.providers.cncf.kubernetes.triggers.job import KubernetesJobTrigger

    return KubernetesJobTrigger(
        job_name=name, job_namespace=namespace, pod_names=[], pod_namespace=namespace, in_cluster=False, **common
    )


async def _child(who: str, namespace: str, seconds: float, names: list[str]) -> dict[str, Any]:
    requests = _count_requests()
    seen: dict[str, float] = {}

    async def wait(name: str) -> None:
        trigger = _trigger(who, name, namespace)
        async for event in trigger.run():
            seen[name] = time.monotonic()
            kind = event.payload.get("kind") or event.payload.get("status")
            assert kind in ("ended", "success"), event.payload
            return

    print("end the warm one", flush=True)
    await asyncio.wait_for(wait(WARM), 120)  # what is imported and made once is no cost of a job
    reference = _Reference(COLLECTIONS[who].format(namespace))
    reference.start()
    await asyncio.to_thread(reference.ready.wait)
    gc.collect()
    requests[0], memory = 0, _memory()
    began, cpu = time.monotonic(), _cpu(reference)
    worst = [0.0, 0.0]
    dog = asyncio.create_task(_watchdog(worst))
    tasks = [asyncio.create_task(wait(name)) for name in names]
    await asyncio.sleep(min(10.0, seconds / 2))  # the start is counted in all, not at rest
    rest, rest_cpu = time.monotonic(), _cpu(reference)
    await asyncio.sleep(seconds)
    rest, rest_cpu = time.monotonic() - rest, _cpu(reference) - rest_cpu
    blocked = list(worst)
    gc.collect()
    memory = _memory() - memory
    await asyncio.sleep(0.1)
    worst[:] = blocked  # that collection is the bench's own
    print("end all", flush=True)
    await asyncio.wait(tasks, timeout=120 + len(names) / 4)
    minutes = (time.monotonic() - began) / 60
    dog.cancel()
    missed = [task for task in tasks if not task.done() or task.exception()]
    delays = [
        max(0.0, seen[name] - reference.ended[name]) for name in names if name in seen and name in reference.ended
    ]
    return {
        "jobs": len(names),
        "missed": len(missed),
        "requests": requests[0] / len(names) / minutes,
        "rest_ms": 1000 * rest_cpu / len(names) / (rest / 60),
        "all_ms": 1000 * (_cpu(reference) - cpu) / len(names),
        "kb": memory / len(names) / 1000,
        "delay": median(delays),
        "worst": max(delays),
        "blocked": worst[0],
        "blocked_cpu": worst[1],
    }


def _count_requests() -> list[int]:
    import aiohttp

    count, send = [0], aiohttp.ClientSession._request

    async def request(self: Any, *args: Any, **more: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            count[0] += 1
        return await send(self, *args, **more)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]
    return count


class _Reference(threading.Thread):
    """Watches the same objects in a thread of its own and notes when the API tells each end."""

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.ready = threading.Event()
        self.ended: dict[str, float] = {}
        self.cpu = 0.0

    def run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        from kubeflow_training.jobs.kubernetes.client import AsyncCluster, from_kubeconfig

        cluster = AsyncCluster(from_kubeconfig)
        version = (await cluster.json("list", self._path))["metadata"]["resourceVersion"]
        params = [("watch", "1"), ("resourceVersion", version)]
        async with cluster.stream("watch", self._path, params, 3600) as blocks:
            self.ready.set()
            rest = b""
            async for block in blocks:
                *lines, rest = (rest + block).split(b"\n")
                for item in (json.loads(line)["object"] for line in lines if line):
                    status = item.get("status") or {}
                    words = {it["type"] for it in status.get("conditions") or () if it["status"] == "True"}
                    if ENDS & {*words, status.get("phase")}:
                        self.ended.setdefault(item["metadata"]["name"], time.monotonic())
                self.cpu = time.thread_time()


async def _watchdog(worst: list[float]) -> None:
    """How long the loop stood still; the second figure is its own CPU time, which other processes do not lengthen."""
    while True:
        began, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(0.05)
        worst[0] = max(worst[0], time.monotonic() - began - 0.05)
        worst[1] = max(worst[1], time.thread_time() - cpu)


def _cpu(reference: _Reference) -> float:
    return time.process_time() - reference.cpu


def _memory() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _run_child(run: Callable[..., Coroutine[Any, Any, dict[str, Any]]], arguments: list[str]) -> None:
    who, namespace, seconds, *names = arguments
    print(json.dumps(asyncio.run(run(who, namespace, float(seconds), names))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _run_child(_child, sys.argv[2:])
    else:
        typer.run(main)
