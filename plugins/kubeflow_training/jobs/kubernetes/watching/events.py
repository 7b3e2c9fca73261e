"""Why jobs wait, failed or are gone: events, Kueue's Workloads and nodes.

One list for all who wait, and none while all is well; nodes only of a gang that failed without saying why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import JobError, JobRefusedError
from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, NotThereError
from kubeflow_training.jobs.kubernetes.nodes import REFUSED
from kubeflow_training.jobs.kubernetes.watching.reflector import PAGE, slim
from kubeflow_training.jobs.observation import kueue, nodes
from kubeflow_training.jobs.observation.reader import nodes_to_ask, places
from kubeflow_training.jobs.shapes import born, labels, last_seen, mapping
from kubeflow_training.jobs.waiting.signals import happens

_PATIENCE: Final = 2.0  # seconds: most jobs start without a word being needed
_SECONDS: Final = (5.0, 60.0)  # between two lists; twice as long each time
_PAGES: Final = 10
_PODS_ASKED: Final = 4
_KEPT: Final = 20  # events per object
_FAILED_KEPT: Final = 100  # jobs whose nodes are kept
_REFUSED_SECONDS: Final = 300.0
_NODES: Final = "/api/v1/nodes/"

log = logging.getLogger(__name__)


class EventReader:
    """Events and Workloads of one namespace. Without the right to see them less is known, and nothing fails."""

    def __init__(self, cluster: AsyncCluster, namespace: str, kind: Kind) -> None:
        self._cluster, self._kind = cluster, kind
        self._namespace = quote(namespace, safe="")
        self._path = f"/api/v1/namespaces/{self._namespace}/events"
        self._found: dict[str, list[Mapping[str, Any]]] = {}  # by the uid of the job or pod
        self._workloads: dict[str, Mapping[str, Any]] = {}  # by the uid of the job
        self._nodes: dict[str, list[Mapping[str, Any]]] = {}  # by the uid of the job
        self._not_before: dict[str, float] = {}
        self.wanted = asyncio.Event()
        """Set when somebody begins to wait."""

    def about(self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """What was last read about the job and its pods, oldest first; its Workload and its nodes are the last."""
        found = [event for thing in (job, *pods) for event in self._found.get(_uid(thing), ())]
        workload = self._workloads.get(_uid(job))
        held = [workload] if workload is not None and kueue.worth_asking(job) else []
        return [*sorted(found, key=last_seen), *held, *self._nodes.get(_uid(job), ())]

    async def run(self, waiting: Callable[[], list[Snapshot]], tell: Callable[[], None]) -> None:
        """Read events as long as somebody waits, ever more rarely; begin anew when another one does.

        :param waiting: the jobs that wait; called before each list.
        :param tell: called after each, when `about` may have news.
        """
        while True:
            await self.wanted.wait()
            await asyncio.sleep(_PATIENCE)
            self.wanted.clear()
            pause = _SECONDS[0]
            while snapshots := waiting():
                with suppress(JobError):
                    if any(not kueue.worth_asking(item.job) for item in snapshots):
                        await self._list(snapshots)
                    await self._list_workloads([item.job for item in snapshots if kueue.worth_asking(item.job)])
                    tell()
                if await happens(self.wanted, pause):
                    break
                pause = min(pause * 2, _SECONDS[1])
            else:
                self._found.clear()
                self._workloads.clear()

    async def read_about(self, snapshot: Snapshot, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """Read the events of one job and of those of its pods that do not run, and its nodes if they may be at fault.

        :param before: the pods that were known a moment ago: of a job that has failed, its controller removes the rest.
        :raises JobError: if the cluster cannot be asked; not if it refuses.
        """
        odd = [pod for pod in snapshot.pods if mapping(pod.get("status")).get("phase") not in ("Running", "Succeeded")]
        for thing in (snapshot.job, *odd[:_PODS_ASKED]):
            self._found[_uid(thing)] = await self.last_words(_uid(thing))
        # Of pods that were forced off a node nothing is left but their events.
        mine, there = _uid(snapshot.job), {_uid(pod) for pod in snapshot.pods}
        gone = [pod for pod in before if _uid(pod) not in there]
        for pod in gone[:_PODS_ASKED]:
            self._found[mine] = sorted([*self._found[mine], *await self.last_words(_uid(pod))], key=last_seen)
        name = str(snapshot.job["metadata"]["name"])
        if (creator := self._kind.creator(name)) != name:
            # What makes the pods is another object than the job; one before it may have left events.
            told = await self._events(f"involvedObject.name={creator}")
            told = [event for event in told if last_seen(event) >= born(snapshot.job)]
            self._found[mine] = sorted([*self._found[mine], *told], key=last_seen)[-_KEPT:]
        await self._read_nodes(snapshot, before)

    async def _read_nodes(self, snapshot: Snapshot, before: Sequence[Mapping[str, Any]]) -> None:
        found: list[Mapping[str, Any]] = []
        known = [str(node["metadata"]["name"]) for node in self._nodes.get(snapshot.uid, ())]
        names = nodes_to_ask(
            snapshot.job, snapshot.pods, self.about(snapshot.job, snapshot.pods), [*places(before), *known]
        )
        for name in names if time.monotonic() >= self._not_before.get(_NODES, 0.0) else ():
            try:
                found.append(nodes.told(await self._cluster.json("get", _NODES + quote(name, safe=""))))
            except NotThereError:
                continue
            except JobRefusedError as error:
                self._not_before[_NODES] = time.monotonic() + _REFUSED_SECONDS
                log.info(REFUSED, error)
                break
        if names:
            self._nodes[snapshot.uid] = found
        if len(self._nodes) > _FAILED_KEPT:
            del self._nodes[next(iter(self._nodes))]

    async def last_words(self, uid: str) -> list[Mapping[str, Any]]:
        """Events of one object, oldest first; of one that is gone too, for an hour.

        :raises JobError: if the cluster cannot be asked; not if it refuses.
        """
        return sorted(await self._events(f"involvedObject.uid={uid}"), key=last_seen)[-_KEPT:]

    async def _events(self, selector: str) -> list[Mapping[str, Any]]:
        return await self._pages("events", self._path, [("fieldSelector", selector)], most=1)

    async def _list(self, snapshots: list[Snapshot]) -> None:
        owners = {_uid(thing): _uid(thing) for item in snapshots for thing in (item.job, *item.pods)}
        creators = {self._kind.creator(str(item.job["metadata"]["name"])): item.job for item in snapshots}
        found: dict[str, list[Mapping[str, Any]]] = {}
        for event in await self._pages("events", self._path, []):
            about = mapping(event.get("involvedObject"))
            uid = owners.get(str(about.get("uid")))
            if uid is None and (job := creators.get(str(about.get("name")))) is not None:
                # What makes the pods may be another object than the job; one before it may have left events.
                uid = _uid(job) if last_seen(event) >= born(job) else None
            if uid is not None:
                found.setdefault(uid, []).append(event)
        self._found = {uid: sorted(events, key=last_seen)[-_KEPT:] for uid, events in found.items()}

    async def _list_workloads(self, jobs: list[Mapping[str, Any]]) -> None:
        """The Workloads of jobs that Kueue holds back, with their positions."""
        if not jobs:
            return
        mine = {_uid(job) for job in jobs}
        found: dict[str, Mapping[str, Any]] = {}
        for workload in await self._kueue(kueue.GROUP, "workloads"):
            uid = str(labels(workload).get(f"{kueue.GROUP}/job-uid"))
            if uid in mine and born(workload) >= born(found.get(uid, {})):
                found[uid] = workload
        queues = {str(mapping(item.get("spec")).get("queueName") or "") for item in found.values()} - {""}
        answers: dict[str, Mapping[str, Any]] = {}
        for queue in queues:
            path = f"localqueues/{quote(queue, safe='')}/pendingworkloads"
            answers[queue] = {"items": await self._kueue(kueue.VISIBILITY_GROUP, path)}
        self._workloads = {
            uid: kueue.with_position(item, answers.get(str(mapping(item.get("spec")).get("queueName") or "")))
            for uid, item in found.items()
        }

    async def _kueue(self, group: str, what: str) -> list[Mapping[str, Any]]:
        for version in kueue.VERSIONS:
            path = f"/apis/{group}/{version}/namespaces/{self._namespace}/{what}"
            if found := await self._pages("kueue", path, []):
                return found
        return []

    async def _pages(
        self, verb: str, path: str, params: list[tuple[str, str]], most: int = _PAGES
    ) -> list[Mapping[str, Any]]:
        if time.monotonic() < self._not_before.get(path, 0.0):
            return []
        found: list[Mapping[str, Any]] = []
        more = ""
        for _ in range(most):
            try:
                query = [*params, ("limit", str(PAGE)), *([("continue", more)] if more else [])]
                page = await self._cluster.json(verb, path, query)
            except (JobRefusedError, NotThereError):
                self._not_before[path] = time.monotonic() + _REFUSED_SECONDS
                return found
            found += [slim(item) for item in page.get("items") or ()]
            if not (more := str(mapping(page.get("metadata")).get("continue") or "")):
                break
        return found


def _uid(thing: Mapping[str, Any]) -> str:
    return str(mapping(thing.get("metadata")).get("uid") or "")
