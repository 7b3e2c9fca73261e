"""Waiting on a backend that cannot tell news: one thread looks at all jobs of a process, once per interval."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from kubeflow_training.jobs.backend import Backend, LogChunk, Position, Snapshot
from kubeflow_training.jobs.errors import BackendUnauthorizedError, BackendUnavailableError, JobError
from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.shapes import items, mapping
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.jobs.waiting.signals import happens

_FULL: Final = 2000  # lines of one pod at a look
_FINISH_LOOKS: Final = 2  # without a new line, before an ended job's log counts as read
_POLLS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Poll]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Seen:
    """What was last seen of a job; see `jobs.kubernetes.watching.subscription.Look`."""

    known: bool
    snapshot: Snapshot | None = None
    trouble: JobError | None = None


@dataclass
class _Wish:
    """A pod whose log is wanted from a position on, and what the last look brought."""

    pod: Mapping[str, Any]
    position: Position | None
    skip: int = 0  # lines after the position that were shown already
    chunk: LogChunk | None = None

    @classmethod
    def of(cls, pod: Mapping[str, Any], left: Position | None) -> _Wish:
        position = {key: value for key, value in (left or {}).items() if key != "skip"}
        return cls(pod, position or None, int((left or {}).get("skip") or 0))


@dataclass(eq=False)
class PollSubscription:
    """One who waits for one job. Made by `Poll.subscribe`; has to be closed."""

    poll: Poll
    name: str
    namespace: str
    uid: str | None
    interval: float
    seen: Seen = field(default_factory=lambda: Seen(False))
    wishes: dict[str, _Wish] = field(default_factory=dict)
    looks: int = 0
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self) -> Seen:
        return self.seen

    async def changed(self, within: float | None = None) -> bool:
        news = await happens(self._event, within)
        if news:
            self._event.clear()
        return news

    async def refresh(self) -> None:
        """Wait for a look that begins from now on."""
        looks = self.looks
        while self.looks < looks + 2:
            self.poll.look_soon()
            await self.changed(self.interval)

    async def last_words(self, uid: str) -> list[Mapping[str, Any]]:
        return await asyncio.to_thread(self.poll.last_words, self.namespace, uid)

    def waits(self, waiting: bool) -> None:
        """Every look reads events anyway."""

    async def close(self) -> None:
        await self.poll.unsubscribe(self)

    def notify(self) -> None:
        self._event.set()


class Poll:
    """Looks at all jobs that somebody waits for. Use `shared_poll`."""

    def __init__(self, connect: Callable[[], Backend]) -> None:
        self._connect = connect
        self._backend: Backend | None = None
        self._subscribers: set[PollSubscription] = set()
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        self.release: Callable[[], None] = lambda: None

    def subscribe(self, name: str, namespace: str, uid: str | None, interval: float) -> PollSubscription:
        who = PollSubscription(self, name, namespace, uid, interval)
        self._subscribers.add(who)
        self._soon.set()
        if self._task is None:
            # An empty context: what is logged here belongs to nobody's task log.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        return who

    async def unsubscribe(self, who: PollSubscription) -> None:
        self._subscribers.discard(who)
        if not self._subscribers and self._task is not None:
            task, self._task = self._task, None
            self.release()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def last_words(self, namespace: str, uid: str) -> list[Mapping[str, Any]]:
        """Events of a job that is gone, where the backend keeps them."""
        ask = getattr(self._backend, "last_words", None)
        return list(ask(namespace, uid)) if ask is not None else []

    def look_soon(self) -> None:
        self._soon.set()

    async def _run(self) -> None:
        while True:
            await happens(self._soon, min((who.interval for who in self._subscribers), default=1.0))
            self._soon.clear()
            everyone = list(self._subscribers)
            found = await asyncio.to_thread(self._look_at, everyone)
            for who, (seen, chunks) in zip(everyone, found, strict=True):
                who.looks += 1
                for name, chunk in chunks.items():
                    if name in who.wishes:
                        who.wishes[name].chunk = chunk
                        if len(chunk.lines) >= _FULL:
                            self._soon.set()
                who.seen = seen
                who.notify()

    def _look_at(self, everyone: list[PollSubscription]) -> list[tuple[Seen, dict[str, LogChunk]]]:
        return [self._look(who) for who in everyone]

    def _look(self, who: PollSubscription) -> tuple[Seen, dict[str, LogChunk]]:
        """In the thread: read one job and what is new in its logs."""
        try:
            self._backend = backend = self._backend or self._connect()
            snapshot = backend.read(who.name, who.namespace)
            if snapshot is not None and who.uid not in (None, snapshot.uid):
                snapshot = None
            # What a slow reader has not shown yet is not read over: so memory stays bounded.
            wishes = {name: wish for name, wish in list(who.wishes.items()) if wish.chunk is None}
            chunks = {name: backend.logs(wish.pod, wish.position, _FULL) for name, wish in wishes.items()}
        except BackendUnavailableError as error:
            if isinstance(error, BackendUnauthorizedError):
                self._backend = None
            return Seen(who.seen.known, who.seen.snapshot, error), {}
        except JobError as error:
            return Seen(who.seen.known, who.seen.snapshot, error), {}
        except Exception as error:  # a file that cannot be read must not end the waiting of all others
            trouble = BackendUnavailableError(f"job {who.namespace}/{who.name}", repr(error), "It is tried again")
            return Seen(who.seen.known, who.seen.snapshot, trouble), {}
        return Seen(True, snapshot), chunks


class PolledLogs:
    """Takes the log lines that a `Poll` finds. See `jobs.waiting.job.Logs` for the calls.

    :param ranks: "all", "first" or "none".
    """

    def __init__(self, subscription: PollSubscription, log: JobLog, ranks: str, connect: Callable[[], Backend]) -> None:
        self._subscription, self._log, self._ranks, self._connect = subscription, log, ranks, connect
        self._replicas: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._taking = asyncio.Lock()

    def update(self, snapshot: Snapshot | None) -> None:
        if self._ranks == "none" or snapshot is None:
            return
        kind = kind_seen(snapshot.job)
        for pod in snapshot.pods:
            name = str(mapping(pod.get("metadata")).get("name"))
            leads = kind.node_rank(pod, snapshot.job) == 0
            if not has_begun(pod) or not (leads or self._ranks == "all"):
                continue
            self._replicas[name] = kind.replica(pod)
            wish = self._subscription.wishes.get(name)
            if wish is None:
                self._subscription.wishes[name] = _Wish.of(pod, self._log.positions.get(name))
            else:
                wish.pod = pod
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._take()

    async def _take(self) -> bool:
        """Show what the last look brought; whether there was anything."""
        some = False
        async with self._taking:
            for name, wish in list(self._subscription.wishes.items()):
                chunk = wish.chunk
                if chunk is None:
                    continue
                lines = chunk.lines[wish.skip :]
                if lines:
                    some = True
                    await self._log.add(name, self._replicas[name], lines, partial(_position, wish, chunk))
                if chunk.lines:
                    wish.position, wish.skip = chunk.position, 0
                wish.chunk = None
        return some

    async def finish(self) -> None:
        """One more look reads what the ranks wrote between their log's end and the job's."""
        if self._ranks == "none":
            return
        quiet = 0
        while quiet < _FINISH_LOOKS and self._subscription.wishes and not self._log.full:
            await self._subscription.refresh()
            quiet = 0 if await self._take() else quiet + 1

    async def tail(self, pod: Mapping[str, Any], lines: int) -> list[str]:
        try:
            return await asyncio.to_thread(lambda: self._connect().tail(pod, lines))
        except JobError:
            return []

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _position(wish: _Wish, chunk: LogChunk, index: int) -> Mapping[str, Any]:
    """Where to go on after a line of a chunk: the backend's own positions lie between chunks."""
    shown = wish.skip + index + 1
    if shown == len(chunk.lines):
        return chunk.position or {}
    return {**(wish.position or {}), "skip": shown}


def shared_poll(key: Hashable, connect: Callable[[], Backend]) -> Poll:
    """The poll of a backend, made if nobody waits there yet.

    :param key: names the backend; `connect` must lead there.
    """
    polls = _POLLS.setdefault(asyncio.get_running_loop(), {})
    poll = polls.get(key)
    if poll is None:
        poll = polls[key] = Poll(connect)

        def release() -> None:
            if polls.get(key) is poll:
                del polls[key]

        poll.release = release
    return poll


def has_begun(pod: Mapping[str, Any]) -> bool:
    """Whether its container has started, so that there may be a log."""
    states = (mapping(item.get("state")) for item in items(mapping(pod.get("status")).get("containerStatuses")))
    return any(state.keys() & {"running", "terminated"} for state in states)
