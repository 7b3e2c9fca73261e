"""The logs of a job's pods, read while the job is waited for, and to their end when it has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.kubernetes.client import AsyncCluster
from kubeflow_training.jobs.kubernetes.podlog import PodLog, container_status, tail
from kubeflow_training.jobs.shapes import mapping
from kubeflow_training.jobs.waiting.joblog import JobLog

logger = logging.getLogger(__name__)
_FINISH_SECONDS: Final = 30.0  # without a byte from any pod of an ended job
_SURVIVOR_SECONDS: Final = 5.0  # for pods that still run when their job has ended


class KubernetesLogs:
    """Reads the logs of a job's pods. See `jobs.waiting.job.Logs` for the calls.

    :param ranks: "all", "first" or "none".
    """

    def __init__(self, cluster: AsyncCluster, kind: Kind, log: JobLog, ranks: str) -> None:
        self._cluster, self._kind, self._log, self._ranks = cluster, kind, log, ranks
        self._readers: dict[str, PodLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update(self, snapshot: Snapshot | None) -> None:
        if self._ranks == "none":
            return
        pods = {str(pod["metadata"]["uid"]): pod for pod in snapshot.pods} if snapshot else {}
        names = {str(pod["metadata"]["name"]) for pod in pods.values()}
        for uid, reader in self._readers.items():
            reader.update(pods.get(uid), replaced=uid not in pods and reader.name in names)
        for uid, pod in pods.items():
            if uid in self._readers or not _has_begun(pod, self._kind.training_container(pod)):
                continue
            leads = self._kind.node_rank(pod, snapshot.job if snapshot else None) == 0
            if leads or self._ranks == "all":
                reader = self._readers[uid] = PodLog(self._cluster, self._kind, self._log, pod, leads)
                self._tasks[uid] = asyncio.create_task(_run(reader))

    async def finish(self) -> None:
        """Read what there is of an ended job's logs; gives up on a pod that brings nothing for too long."""
        patience = time.monotonic() + _SURVIVOR_SECONDS
        for reader in self._readers.values():
            reader.hurry()
        while rest := {uid: task for uid, task in self._tasks.items() if not task.done()}:
            before = self._read_so_far()
            ending = any(self._readers[uid].ended for uid in rest)
            wait = _FINISH_SECONDS if ending else patience - time.monotonic()
            if wait <= 0:
                break  # only pods that outlive their job are left
            await asyncio.wait(rest.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if ending and self._read_so_far() == before and not any(task.done() for task in rest.values()):
                for uid in rest:
                    self._readers[uid].give_up()
                break
        await self.close()

    def _read_so_far(self) -> int:
        return sum(reader.bytes for reader in self._readers.values()) + self._log.lines

    async def tail(self, pod: Mapping[str, Any], lines: int) -> list[str]:
        """The last lines of a pod's log; none if they cannot be had."""
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        try:
            return await tail(self._cluster, path, self._kind.training_container(pod), lines)
        except JobError:
            return []

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(reader: PodLog) -> None:
    try:
        await reader.run()
    except Exception as error:  # one pod's log must not end the others', nor end unsaid
        logger.exception("the log of pod %s is read no further", reader.name)
        reader.broken(error)


def _has_begun(pod: Mapping[str, Any], container: str) -> bool:
    state = container_status(pod, container)
    begun = mapping(state.get("state")).keys() & {"running", "terminated"}
    return bool(begun) or int(state.get("restartCount") or 0) > 0
