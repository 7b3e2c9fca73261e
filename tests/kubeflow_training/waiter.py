"""Waiting for jobs on a real cluster as a triggerer does, through a proxy that a test may cut."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.kubernetes.client import from_kubeconfig
from kubeflow_training.jobs.kubernetes.logs import KubernetesLogs
from kubeflow_training.jobs.kubernetes.watching.feed import Feed
from kubeflow_training.jobs.kubernetes.watching.sharing import shared_feed
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.waiting.job import End, Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog, LogLimit
from kubeflow_training.jobs.waiting.limits import Limits

from tests.kubeflow_training.outage import Proxy
from tests.kubeflow_training.rights import Rights
from tests.kubeflow_training.situations import IMAGE, PRETEND

PATIENCE = 150.0


class Place:
    """A namespace with a proxy before its API server, and short words for what tests do there."""

    def __init__(self, rights: Rights, folder: Path) -> None:
        self.rights, self.proxy = rights, Proxy()
        self.path = folder / f"{uuid.uuid4().hex[:8]}.kubeconfig"
        self.renew()
        self.backend = KubernetesCluster(rights.client())
        self._names: list[str] = []

    def renew(self) -> None:
        self.rights.write(self.path, self.proxy.url)

    @property
    def namespace(self) -> str:
        return str(self.rights.namespace)

    def pretend(
        self, ends_after: str | None = None, exit_code: int = 0, nodes: int = 1, starts_after: str = "", **more: Any
    ) -> Snapshot:
        """A gang on pretend nodes that runs for so long."""
        annotations = {"test.local/exit-code": str(exit_code)}
        if starts_after:
            annotations["test.local/starts-after"] = starts_after
        if ends_after is not None:
            annotations["test.local/ends-after"] = ends_after
        return self._create(["true"], annotations, nodes=nodes, **(PRETEND | more))

    def script(self, script: str, nodes: int = 1, **more: Any) -> Snapshot:
        """A gang that runs a shell script on every pod."""
        return self._create(["/bin/sh", "-c", script], {}, nodes=nodes, **more)

    def _create(self, command: list[str], annotations: dict[str, str], restart: str = "Never", **more: Any) -> Snapshot:
        name = f"wait-{uuid.uuid4().hex[:8]}"
        values = {"cpus": 0.05, "memory_gb": 0.05, "grace_seconds": 2} | more
        manifest = pytorch_job(name=name, namespace=self.namespace, image=IMAGE, command=command, **values)
        for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
            replica["restartPolicy"] = restart
            replica["template"]["metadata"].setdefault("annotations", {}).update(annotations)
            replica["template"]["spec"]["containers"][0]["imagePullPolicy"] = "IfNotPresent"
        self._names.append(name)
        return self.backend.create(manifest)

    def finish(self, *jobs: Snapshot) -> None:
        """Pods of pretend gangs without an end of their own are done now."""
        core, note = self.rights._core, {"metadata": {"annotations": {"test.local/ends-after": "0s"}}}
        for job in jobs:
            selector = PYTORCH_JOB.selector(job.job["metadata"]["name"])
            for pod in core.list_namespaced_pod(self.namespace, label_selector=selector).items:
                core.patch_namespaced_pod(pod.metadata.name, self.namespace, note)

    def close(self) -> None:
        for name in self._names:
            self.backend.delete(name, self.namespace, grace_seconds=0)
        self.proxy.close()


class Waiter:
    """One who waits for one job in the running loop, together with all others of the same place."""

    def __init__(
        self,
        place: Place,
        name: str,
        uid: str | None = None,
        *,
        ranks: str = "none",
        left: dict[str, Any] | None = None,
        limits: Limits | None = None,
        log_limit: int | str | None = None,
        must_exist: bool = True,
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.lines: list[str] = []
        self.ended_at = 0.0

        def show(line: str) -> None:
            self.lines.append(line)
            on_line(line)

        self.log = JobLog(show, LogLimit.of(log_limit), left)
        path = str(place.path)
        self.feed: Feed = shared_feed(path, lambda: from_kubeconfig(path), place.namespace, PYTORCH_JOB)
        self.news = self.feed.subscribe(name, uid)
        logs = KubernetesLogs(self.feed.cluster, PYTORCH_JOB, self.log, ranks)
        self.waiting = Waiting(name, uid, self.news, self.log, logs, limits=limits, must_exist=must_exist)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> End:
        try:
            end = await self.waiting.run()
            self.ended_at = time.time()
            return end
        finally:
            await self.news.close()

    async def end(self, seconds: float = PATIENCE) -> End:
        async with asyncio.timeout(seconds):
            return await self.task

    async def until(self, what: Callable[[], Any], seconds: float = PATIENCE) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                assert not self.task.done() or self.task.result(), self.lines[-20:]
                await asyncio.sleep(0.02)

    async def stop(self) -> dict[str, Any]:
        """As a triggerer that stops; what it left for the next one."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.log.state()

    def of(self, replica: str) -> list[str]:
        """The lines of one rank."""
        mark = f"[{replica}] "
        return [line.removeprefix(mark) for line in self.lines if line.startswith(mark)]
