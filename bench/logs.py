"""The logs of a gang, read while one waits: our readers beside the log reading of the cncf-kubernetes provider.

    python -m bench.logs [--megabytes 8 --ranks 4]          # the full figures: --megabytes 100 --ranks 8

Needs KUBECONFIG with the training operator and a real node. Each reader reads such a gang from its start, in a process
of its own. Showing a line costs what Airflow's triggerer needs for it (70 microseconds: 14,000 lines a second). The
peer's trigger reads again every two seconds, as it does with `logging_interval=2`, one loop per pod.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import time
import uuid
from typing import Annotated, Any

import typer

from bench.cluster import leave_out_without_cluster, reader

LINE = 100  # bytes
IMAGE = os.environ.get("KUBEFLOW_TRAINING_TEST_IMAGE", "test.local/shell:1")
NAMES = {"ours": "ours", "provider": "the provider's"}


def main(
    megabytes: Annotated[float, typer.Option(help="Of all ranks together.", min=0.1)] = 8.0,
    ranks: Annotated[int, typer.Option(help="Pods that write.", min=1)] = 4,
    microseconds: Annotated[float, typer.Option(help="What showing one line costs.", min=0)] = 70.0,
) -> None:
    """Read the log of a gang with both readers, print what it takes and what is missing."""
    leave_out_without_cluster()
    lines = int(megabytes * 1e6 / LINE / ranks)
    found = {who: _run(who, lines, ranks, microseconds) for who in NAMES}
    print(f"{lines * ranks} lines of {LINE} bytes over {ranks} ranks")
    print(
        f"{'':16}{'lost':>9}{'repeated':>10}{'loop stood still':>18}{'memory':>10}{'CPU':>8}{'time':>8}{'requests':>10}"
    )
    for who, it in found.items():
        print(
            f"{NAMES[who]:16}{it['lost']:9}{it['repeated']:10}{it['blocked']:16.2f} s{it['mb']:7.0f} MB"
            f"{it['cpu']:6.1f} s{it['seconds']:6.1f} s{it['requests']:10}"
        )
    ours, peer = found["ours"], found["provider"]
    print(f"lost {ours['lost']} and repeated {ours['repeated']} lines (bar 0); stated gaps: {ours['gaps'] or 'none'}")
    print(f"the loop stood still for {ours['blocked']:.2f} s, {ours['blocked_cpu']:.2f} s of it its own work (bar 0.2)")
    print(f"memory {ours['mb']:.0f} MB above rest (bar 50), the peer {peer['mb']:.0f} MB")


def _run(who: str, lines: int, ranks: int, microseconds: float) -> dict[str, Any]:
    from kubernetes import client, config

    core = client.CoreV1Api(config.new_client_from_config())
    namespace = f"bench-logs-{uuid.uuid4().hex[:6]}"
    core.create_namespace({"metadata": {"name": namespace}})
    try:
        with reader("bench.logs", who, namespace, str(lines), str(ranks), str(microseconds)) as process:
            out, _ = process.communicate()
    finally:
        core.delete_namespace(namespace)
    if process.returncode:
        raise SystemExit(f"{NAMES[who]} reader ended without figures")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# In the process of one reader


class _Sink:
    """Takes lines, counts each, and costs time as Airflow's own log does."""

    def __init__(self, lines: int, ranks: int, microseconds: float) -> None:
        self.seen = [bytearray(lines) for _ in range(ranks)]
        self._seconds = microseconds / 1e6
        self.gaps: list[dict[str, Any]] = []

    def show(self, line: str) -> None:
        until = time.perf_counter() + self._seconds
        _, _, text = line.partition("line ")
        if text:
            rank, number, _ = text.split(" ", 2)
            counts = self.seen[int(rank)]
            counts[int(number) - 1] = min(255, counts[int(number) - 1] + 1)
        while time.perf_counter() < until:
            pass


def _submit(namespace: str, lines: int, ranks: int) -> str:
    from kubeflow_training.jobs.kubernetes import KubernetesCluster
    from kubeflow_training.jobs.manifest import pytorch_job

    filler = "x" * (LINE - 20)
    script = f'yes {filler} | head -n {lines} | awk -v r=$RANK \'{{print "line " r " " NR " " $0}}\'; '
    script += "[ $RANK = 0 ] && sleep 45; exit 0"  # its success would end those that still write
    place: dict[str, Any] = {"cpus": 0.1, "memory_gb": 0.05, "grace_seconds": 2}
    command = ["/bin/sh", "-c", script]
    manifest = pytorch_job(name="logs", namespace=namespace, image=IMAGE, command=command, nodes=ranks, **place)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        container = replica["template"]["spec"]["containers"][0]
        container["imagePullPolicy"] = "IfNotPresent"
        container["resources"]["limits"]["cpu"] = "100m"  # elsewhere they run on other machines than their readers
    return KubernetesCluster().create(manifest).uid


async def _ours(namespace: str, uid: str, _: int, sink: _Sink) -> None:
    from kubeflow_training.hooks import PyTorchJobHook
    from kubeflow_training.jobs.waiting.joblog import JobLog

    log = JobLog(sink.show)
    async with PyTorchJobHook().waiting("logs", namespace, log, uid=uid) as waiting:
        end = await waiting.run()
    sink.gaps = log.gaps
    assert end.observation is not None
    assert end.observation.phase == "succeeded", end


async def _provider(namespace: str, _: str, ranks: int, sink: _Sink) -> None:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from airflow.providers.cncf.kubernetes.utils.pod_manager import AsyncPodManager

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sink.show(record.getMessage())

    hook = AsyncKubernetesHook(conn_id="kubernetes_default")
    manager = AsyncPodManager(async_hook=hook)
    logger = logging.getLogger("bench.provider")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    manager._log = logger  # type: ignore[assignment]

    async def read(name: str) -> None:
        since, state = None, None
        while state not in ("Succeeded", "Failed"):
            await asyncio.sleep(2)
            try:
                pod = await hook.get_pod(name, namespace)
                state = pod.status.phase
                if state in ("Running", "Succeeded", "Failed"):
                    if state != "Running":
                        await asyncio.sleep(1.1)  # the current second is left to the next reading
                    since = await manager.fetch_container_logs_before_current_sec(pod, "pytorch", since)
            except Exception as error:
                print(name, repr(error)[:200], file=sys.stderr)

    await asyncio.gather(*(read(f"logs-worker-{n - 1}" if n else "logs-master-0") for n in range(ranks)))


async def _child(who: str, namespace: str, lines: int, ranks: int, microseconds: float) -> dict[str, Any]:
    import aiohttp
    import psutil
    from airflow.providers.cncf.kubernetes.utils import pod_manager  # noqa: F401 - what is imported is no cost

    requests, send = [0], aiohttp.ClientSession._request

    async def request(self: Any, *args: Any, **more: Any) -> Any:
        requests[0] += 1
        return await send(self, *args, **more)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]
    sink, process = _Sink(lines, ranks, microseconds), psutil.Process()
    uid = await asyncio.to_thread(_submit, namespace, lines, ranks)
    gc.collect()
    rest, worst = process.memory_info().rss, [0.0, 0.0, 0.0]

    async def watch() -> None:
        while True:
            began, used = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.02)
            worst[0] = max(worst[0], time.monotonic() - began - 0.02)
            worst[2] = max(worst[2], time.thread_time() - used)  # its own work, which other processes do not lengthen
            worst[1] = max(worst[1], process.memory_info().rss - rest)

    dog = asyncio.create_task(watch())
    began, cpu = time.monotonic(), time.process_time()
    await (_ours if who == "ours" else _provider)(namespace, uid, ranks, sink)
    dog.cancel()
    counts = [count for seen in sink.seen for count in seen]
    return {
        "lost": counts.count(0),
        "repeated": sum(count - 1 for count in counts if count > 1),
        "gaps": sink.gaps,
        "blocked": worst[0],
        "blocked_cpu": worst[2],
        "mb": worst[1] / 1e6,
        "cpu": time.process_time() - cpu,
        "seconds": time.monotonic() - began,
        "requests": requests[0],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        who, where, *numbers = sys.argv[2:]
        figures = _child(who, where, int(numbers[0]), int(numbers[1]), float(numbers[2]))
        print(json.dumps(asyncio.run(figures)), flush=True)
    else:
        typer.run(main)
