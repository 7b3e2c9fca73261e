"""One watch of the jobs and one of the pods of a namespace, for all who wait there.

A thousand waiting tasks cost the API server two open connections. Nothing is missed: a watch goes on from its
resourceVersion, a list reconciles what a watch could not tell, and an object counts as gone only after a list or a read
that began later than the waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import (
    STARTING_SECONDS,
    BackendUnavailableError,
    JobError,
    JobForbiddenError,
    JobRefusedError,
)
from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, Backoff, NotThereError
from kubeflow_training.jobs.kubernetes.watching.events import EventReader
from kubeflow_training.jobs.kubernetes.watching.reflector import Handler, Reflector, slim
from kubeflow_training.jobs.kubernetes.watching.subscription import Look, Subscription
from kubeflow_training.jobs.shapes import labels, mapping

_GATHER: Final = 0.05  # seconds in which those who begin to wait are gathered into one list
_SINGLE_READS: Final = 8  # more new names than this are had cheaper by a list
_GONE_SECONDS: Final = 60.0  # that a removed pod is remembered: a failed job's may go before their nodes are asked


class Feed:
    """Jobs of one kind in one namespace. `jobs.kubernetes.watching.sharing.shared_feed` finds the one there is."""

    def __init__(self, cluster: AsyncCluster, namespace: str, kind: Kind, *, resync_seconds: float = 600.0) -> None:
        self.cluster, self.namespace, self.kind = cluster, namespace, kind
        self._subscribers: dict[str, set[Subscription]] = {}
        self._jobs: dict[str, dict[str, Any]] = {}
        self._pods: dict[str, dict[str, dict[str, Any]]] = {}
        self._gone: dict[str, list[tuple[float, dict[str, Any]]]] = {}  # name: pods that went, and when
        self._asked: dict[str, float] = {}  # name: when the last list or read began that covers the job
        self._pods_asked: dict[str, float] = {}  # the same for its pods
        self._fetching: dict[str, set[str]] = {}  # name being read: uids that went meanwhile
        self._pending: set[str] = set()
        self._pods_listable = True
        self._pods_seen = False
        self._pods_refused: float | None = None  # since when, without a list in between
        self._fetch, self._first = asyncio.Event(), asyncio.Event()
        self._trouble: JobError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._jobs_path = f"/apis/{kind.api_version}/namespaces/{quote(namespace, safe='')}/{kind.plural}"
        self._pods_path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        jobs = Handler(self._jobs_listed, self._job_changed, self._troubled, self._well)
        pods = Handler(self._pods_told, self._pod_changed, self._pods_troubled, self._well)
        self._job_reflector = Reflector(
            cluster, self._jobs_path, jobs, wanted=self._wants_job, resync_seconds=resync_seconds
        )
        self._pod_reflector = Reflector(
            cluster,
            self._pods_path,
            pods,
            selector=kind.job_label,
            wanted=self._wants_pod,
            resync_seconds=resync_seconds,
        )
        self.events = EventReader(cluster, namespace, kind)
        self.release: Callable[[], AsyncCluster | None] = lambda: None
        """Called when the last subscriber leaves; what it returns is closed. Set by who shares the feed."""

    def subscribe(self, name: str, uid: str | None = None) -> Subscription:
        found = Subscription(self, name, uid)
        self._subscribers.setdefault(name, set()).add(found)
        if not self._tasks:
            self._start()
        else:
            self._pending.add(name)
            self._fetch.set()
        return found

    async def unsubscribe(self, who: Subscription) -> None:
        others = self._subscribers.get(who.name, set())
        others.discard(who)
        if not others:
            self._subscribers.pop(who.name, None)
            for table in (self._jobs, self._pods, self._gone, self._asked, self._pods_asked):
                table.pop(who.name, None)
        if not self._subscribers and self._tasks:
            close = self.release()  # first, so that nobody finds this feed while it ends
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also if the one who leaves is cancelled here
                if close is not None:
                    await close.close()

    def look(self, who: Subscription) -> Look:
        """What is known; never waits."""
        if who.final is not None:
            return Look(True, who.final, None)
        known = not self._unknown(who)
        job = self._jobs.get(who.name)
        if job is not None and who.uid not in (None, job["metadata"]["uid"]):
            job = None
        if job is None or not known:
            return Look(known, None, self._trouble)
        pods = [pod for pod in self._pods.get(who.name, {}).values() if self.kind.owns(job, pod)]
        pods.sort(key=lambda pod: str(pod["metadata"]["name"]))
        return Look(True, Snapshot(job, pods, self.events.about(job, pods), self._pods_listable), self._trouble)

    async def refresh(self, who: Subscription) -> None:
        await self._read(who.name)
        if (snapshot := self.look(who).snapshot) is not None:
            await self.events.read_about(snapshot, self._lately_gone(snapshot.job))

    # Keeping up

    def _start(self) -> None:
        # An empty context: what is logged here belongs to nobody's task log.
        def begin(work: Any) -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(work, context=contextvars.Context())

        self._tasks = [
            begin(_later(self._job_reflector.run)),
            begin(_later(self._pod_reflector.run)),
            begin(self._fetch_new()),
            begin(self._read_events()),
        ]

    async def _read_events(self) -> None:
        def waiting() -> list[Snapshot]:
            everyone = [who for group in self._subscribers.values() for who in group if who.waiting]
            return [found for who in everyone if (found := self.look(who).snapshot) is not None]

        def tell() -> None:
            for group in self._subscribers.values():
                for who in group:
                    if who.waiting:
                        who.notify()

        await self.events.run(waiting, tell)

    async def _fetch_new(self) -> None:
        """Read what new subscribers wait for: the watch tells only what changes."""
        backoff = Backoff()
        while True:
            await self._fetch.wait()
            await asyncio.sleep(_GATHER)
            await self._first.wait()  # the first lists cover most of those who came together
            self._fetch.clear()
            names = {name for name in self._pending if self._any_unknown(name)}
            self._pending.clear()
            if len(names) > _SINGLE_READS:
                self._job_reflector.relist()
                self._pod_reflector.relist()
                continue
            for name in names:
                try:
                    await self._read(name)
                    backoff.reset()
                except Exception as error:  # a broken answer must not end the waiting of those who come later
                    broken = BackendUnavailableError(name, repr(error), "It is tried again")
                    self._troubled(error if isinstance(error, JobError) else broken)
                    self._pending.add(name)
            if self._pending:
                self._fetch.set()
                await backoff.wait()

    def _unknown(self, who: Subscription) -> bool:
        return min(self._asked.get(who.name, -1.0), self._pods_asked.get(who.name, -1.0)) < who.since

    def _any_unknown(self, name: str) -> bool:
        return any(map(self._unknown, self._subscribers.get(name, ())))

    async def _read(self, name: str) -> None:
        began = time.monotonic()
        gone = self._fetching.setdefault(name, set())
        try:
            try:
                job = slim(await self.cluster.json("get", f"{self._jobs_path}/{quote(name, safe='')}"))
            except NotThereError:
                job = None
            pods: list[dict[str, Any]] = []
            if job is not None:
                try:
                    found = await self.cluster.json(
                        "list", self._pods_path, [("labelSelector", self.kind.selector(name))]
                    )
                    pods = [slim(item) for item in found["items"]]
                    self._pods_answered()
                except JobRefusedError as error:
                    if self._may_be_starting(error):
                        raise
                    self._pods_listable = False  # the job alone has to do
        finally:
            self._fetching.pop(name, None)
        if name not in self._subscribers:
            return
        if job is not None and job["metadata"]["uid"] not in gone:
            self._store_job(job)
        elif job is None:
            self._jobs.pop(name, None)
        for pod in pods:
            if pod["metadata"]["uid"] not in gone:
                self._store_pod(name, pod)
        for table in (self._asked, self._pods_asked):
            table[name] = max(began, table.get(name, 0.0))
        self._notify(name)

    # What the reflectors tell

    def _jobs_listed(self, jobs: list[dict[str, Any]], began: float) -> None:
        troubled, self._trouble = self._trouble is not None, None
        found = {str(job["metadata"]["name"]): job for job in jobs}
        for name in self._subscribers:
            before, known = self._jobs.get(name), self._asked.get(name)
            if name in found:
                self._store_job(found[name])
            elif before is not None and (known or 0.0) < began:
                del self._jobs[name]
            self._asked[name] = max(began, known or 0.0)
            if known is None or troubled or _version(before) != _version(self._jobs.get(name)):
                self._notify(name)  # a list that only confirms what is known is no news
        self._fetch_the_rest(self._asked)

    def _job_changed(self, kind: str, job: dict[str, Any]) -> None:
        name = str(job["metadata"]["name"])
        if name not in self._subscribers:
            return
        if kind != "DELETED":
            self._store_job(job)
            self._asked[name] = max(self._asked.get(name, 0.0), min(who.since for who in self._subscribers[name]))
        else:
            uid = job["metadata"]["uid"]
            self._fetching.get(name, set()).add(uid)
            if mapping(self._jobs.get(name, job).get("metadata")).get("uid") == uid:
                pods = [pod for pod in self._pods.get(name, {}).values() if self.kind.owns(job, pod)]
                self._jobs.pop(name, None)
                for who in self._subscribers[name]:
                    if who.uid in (None, uid) and self.kind.ended(job):
                        # It ended and was removed in one breath: its end counts, not its removal.
                        who.final = Snapshot(job, pods, pods_listed=self._pods_listable)
        self._notify(name)

    def _fetch_the_rest(self, asked: Mapping[str, float]) -> None:
        """Read those who began to wait while a list was read."""
        if self._asked and self._pods_asked:
            self._first.set()
        late = {name for name, group in self._subscribers.items() if any(asked[name] < who.since for who in group)}
        if late - self._pending:
            self._pending |= late
            self._fetch.set()

    def _pods_told(self, pods: list[dict[str, Any]], began: float) -> None:
        self._pods_answered()
        self._pods_listed(pods, began)

    def _pods_listed(self, pods: list[dict[str, Any]], began: float) -> None:
        seen: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self._subscribers}
        for pod in pods:
            if (name := self.kind.job_name(pod)) in seen:
                seen[name][str(pod["metadata"]["name"])] = pod
        for name, mine in seen.items():
            before = self._pods.get(name, {})
            news = name not in self._pods_asked or mine.keys() != before.keys()
            news = news or any(_version(mine[key]) != _version(before[key]) for key in mine)
            self._remember(name, [pod for key, pod in before.items() if key not in mine])
            self._pods[name] = {key: pod if _newer(pod, before.get(key)) else before[key] for key, pod in mine.items()}
            self._pods_asked[name] = max(began, self._pods_asked.get(name, 0.0))
            if news:
                self._notify(name)
        self._fetch_the_rest(self._pods_asked)

    def _pod_changed(self, kind: str, pod: dict[str, Any]) -> None:
        name = self.kind.job_name(pod)
        if name is None or name not in self._subscribers:
            return
        if kind == "DELETED":
            self._fetching.get(name, set()).add(pod["metadata"]["uid"])
            mine = self._pods.get(name, {})
            known = mine.get(str(pod["metadata"]["name"]))
            if known is not None and known["metadata"]["uid"] == pod["metadata"]["uid"]:
                del mine[str(pod["metadata"]["name"])]
            self._remember(name, [pod])
        else:
            self._store_pod(name, pod)
        self._notify(name)

    def _well(self) -> None:
        self._trouble = None

    def _pods_troubled(self, error: JobError) -> None:
        # Without the right to see pods a job can still be waited for, with less to tell.
        if isinstance(error, BackendUnavailableError):
            self._troubled(error)
        elif not self._may_be_starting(error):
            self._pods_listable = False
            self._pods_listed([], time.monotonic())

    def _pods_answered(self) -> None:
        self._pods_listable = self._pods_seen = True
        self._pods_refused = None

    def _may_be_starting(self, error: JobError) -> bool:
        """Whether pods that could be seen may be seen again in a moment; until then what is known of them is kept."""
        now = time.monotonic()
        self._pods_refused = self._pods_refused or now
        passing = now - self._pods_refused < STARTING_SECONDS
        return passing and self._pods_seen and isinstance(error, JobForbiddenError)

    def _troubled(self, error: JobError) -> None:
        self._trouble = error
        self._first.set()
        for name in self._subscribers:
            self._notify(name)

    def _store_job(self, job: dict[str, Any]) -> None:
        name = str(job["metadata"]["name"])
        # Lists of built-in kinds leave the kind out.
        job = {"apiVersion": self.kind.api_version, "kind": self.kind.name, **job}
        if _newer(job, self._jobs.get(name)):
            self._jobs[name] = job

    def _store_pod(self, job_name: str, pod: dict[str, Any]) -> None:
        mine = self._pods.setdefault(job_name, {})
        name = str(pod["metadata"]["name"])
        if _newer(pod, mine.get(name)):
            mine[name] = pod

    def _remember(self, job_name: str, pods: list[dict[str, Any]]) -> None:
        """These pods went; those that went long ago are forgotten."""
        now = time.monotonic()
        lately = [item for item in self._gone.get(job_name, ()) if now - item[0] < _GONE_SECONDS]
        self._gone[job_name] = [*lately, *((now, pod) for pod in pods)]

    def _lately_gone(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        since = time.monotonic() - _GONE_SECONDS
        gone = self._gone.get(str(job["metadata"]["name"]), ())
        return [pod for when, pod in gone if when > since and self.kind.owns(job, pod)]

    def _wants_job(self, job: Mapping[str, Any]) -> bool:
        return mapping(job.get("metadata")).get("name") in self._subscribers

    def _wants_pod(self, pod: Mapping[str, Any]) -> bool:
        return labels(pod).get(self.kind.job_label) in self._subscribers

    def _notify(self, name: str) -> None:
        for who in self._subscribers.get(name, ()):
            who.notify()


def _version(item: Mapping[str, Any] | None) -> Any:
    return item and (item["metadata"]["uid"], item["metadata"]["resourceVersion"])


async def _later(work: Callable[[], Any]) -> None:
    await asyncio.sleep(_GATHER)
    await work()


def _newer(item: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    """Whether the item is at least as new: reads and watches overtake each other."""
    if known is None or known["metadata"]["uid"] != item["metadata"]["uid"]:
        return True
    try:
        return int(item["metadata"]["resourceVersion"]) >= int(known["metadata"]["resourceVersion"])
    except ValueError:
        return True
