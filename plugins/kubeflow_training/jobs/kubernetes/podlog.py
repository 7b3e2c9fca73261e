"""The log of one pod, followed while its job is waited for: nothing twice, nothing left out unsaid.

A followed log is one request for hours; looking every two seconds would be thirty a minute. A follow may end for many
reasons (node, API server, a limit of four hours), so the end of a container's log is believed only after one more
reading from the last line on has brought nothing new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final
from urllib.parse import quote
from weakref import WeakKeyDictionary

from kubeflow_training.jobs.errors import (
    STARTING_SECONDS,
    BackendUnavailableError,
    JobError,
    JobForbiddenError,
    JobRefusedError,
)
from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, Backoff, NotThereError
from kubeflow_training.jobs.kubernetes.cursor import Batch, Cursor, Lines, instant, nanoseconds
from kubeflow_training.jobs.kubernetes.rotation import Rotation
from kubeflow_training.jobs.shapes import items, mapping
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.jobs.waiting.signals import happens

FOLLOWED: Final = 256
"""Logs that one process follows at a time; those beyond are read again and again, ever more rarely while quiet."""
_SILENCE: Final = 600.0  # seconds without a line after which a followed log is asked for anew
_READ_SILENCE: Final = 30.0
_PREVIOUS_TRIES: Final = 3
_LOOK_SECONDS: Final = (2.0, 15.0)
_LINE: Final = 1 << 16  # bytes of a line shown in one piece
_AFTER_END: Final = 5.0  # seconds that a follow may stay quiet after its container ended
_HELD_SECONDS: Final = 0.5  # without a byte, after which lines are no longer held back
_NEVER_READ_SECONDS: Final = 5.0
_PROGRESS_SECONDS: Final = 30.0
_ROTATED: Final = "the node has rotated it away or removed it (it keeps about 10 MiB of a container)"
_OUTRUN: Final = "it was written faster than it could be read, and the node has rotated it away"
_ROTATION_SECONDS: Final = 3.0  # the node looks every ten whether a file is full
_FILE_BYTES: Final = 8 << 20  # a file that may be full
_ROTATION_BYTES: Final = 1 << 16  # a log that brings less in that time is not behind
_FOLLOWERS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class PodLog:
    """Reads the log of one pod's training container into a `JobLog`.

    :param lead: whether to read on, rarely, for the progress when the job's log is full.
    """

    def __init__(self, cluster: AsyncCluster, kind: Kind, log: JobLog, pod: Mapping[str, Any], lead: bool) -> None:
        metadata = pod["metadata"]
        self._cluster, self._log, self._lead = cluster, log, lead
        self.name, self.uid, self.replica = str(metadata["name"]), str(metadata["uid"]), kind.replica(pod)
        self._container = kind.training_container(pod)
        namespace = quote(str(metadata["namespace"]), safe="")
        self._path = f"/api/v1/namespaces/{namespace}/pods/{quote(self.name, safe='')}/log"
        left = self._left()
        self._cursor = Cursor.of(left)
        self._rotation = Rotation()
        self.done = bool(left and left.get("done"))
        self._restarts = self._restarts_read = 0
        self.ended = False
        self._gone = False
        self._showing = False
        self._news = asyncio.Event()
        self._told: tuple[Mapping[str, Any] | None, bool] | None = None
        self._backoff = Backoff()
        self._readable = self._cursor.at > 0
        self._forbidden: JobForbiddenError | None = None
        self._forbidden_since = 0.0
        self.bytes = 0
        """Bytes read so far; rises as long as there is something to wait for."""
        self.update(pod)

    def update(self, pod: Mapping[str, Any] | None, replaced: bool = False) -> None:
        """The pod as it is now; None if it is gone.

        :param replaced: whether another pod has its name now, whose log is what the API would give.
        """
        self._replaced = replaced
        state = container_status(pod, self._container)
        over = bool(mapping(state.get("state")).get("terminated"))
        # A container that ended may be started again, and then its log begins anew.
        last = mapping(mapping(pod).get("spec")).get("restartPolicy") == "Never"
        self.ended = (
            pod is None or (over and last) or mapping(pod.get("status")).get("phase") in ("Succeeded", "Failed")
        )
        self._gone = pod is None
        self._pausing = not self.ended and "running" not in mapping(state.get("state"))
        self._restarts = int(state.get("restartCount") or 0)
        if self._told != (pod, replaced):
            self._told = (pod, replaced)
            self._news.set()

    async def run(self) -> None:
        """Until all of the log has been read, or what is missing has been said."""
        pause, whole = _LOOK_SECONDS[0], False
        while not self.done:
            if self._log.full:
                await self._read_progress()
                return
            if self._gone and self._replaced:
                self._removed(whole)
                return
            ended, before = self.ended, self.bytes
            try:
                if not self._cursor.at and self._restarts > self._restarts_read:
                    await self._read_earlier()
                async with _follows(not ended) as follow:
                    await (self._follow() if follow else self._read(False))
                self._backoff.reset()
                whole = follow or ended
                if ended:
                    self._finish()
                elif follow:
                    # The pod's own end may be told a moment later; a container that waits to be started again may
                    # do so for minutes, and says so when it goes on.
                    await self._wait(_LOOK_SECONDS[self._pausing])
                else:
                    pause = _LOOK_SECONDS[0] if self.bytes > before else min(pause * 1.5, _LOOK_SECONDS[1])
                    await self._wait(pause)
            except NotThereError:
                self._removed(whole)
            except BackendUnavailableError:
                whole = False
                await self._pause()
            except JobRefusedError as error:
                if self._gone:
                    self._removed(whole)
                    return
                if "(400)" in error.cause and not self.ended:
                    await self._wait(_LOOK_SECONDS[0])  # the container waits to start
                    continue
                if isinstance(error, JobForbiddenError) and self._may_pass(error):
                    whole = False
                    await self._pause()
                    continue
                self._refused(error)

    def _may_pass(self, error: JobForbiddenError) -> bool:
        """Whether the API server may only have been started: then it knows the account's rights in a moment."""
        now = time.monotonic()
        if self._forbidden is None:
            self._forbidden_since = now
        self._forbidden = error
        # At the end of a job whose log could never be read, the right is most likely missing for good.
        patience = STARTING_SECONDS if self._readable or not self.ended else _NEVER_READ_SECONDS
        return now - self._forbidden_since < patience

    def _refused(self, error: JobRefusedError) -> None:
        if self._readable:
            self._gap(str(error))
        else:
            self._log.say(f"[{self.replica}] -- its log cannot be shown: {error} --")
        if self._readable and error is self._forbidden:
            self.done = True  # another process may be allowed to go on from here
        else:
            self._finish()

    async def _pause(self) -> None:
        """Until the cluster may answer again; news of the pod are a sign that it does."""
        await happens(self._news, self._backoff.seconds())
        self._news.clear()

    def _removed(self, whole: bool) -> None:
        # A log that was followed to its end is whole although its pod is gone.
        if not whole:
            self._gap("the pod was removed before its log was read to the end")
        if self._replaced:
            self.done = True  # the place under this name is the other pod's
        else:
            self._finish()

    async def _follow(self) -> None:
        """Follow the log, but not much longer than its container lives: a connection may outlast it."""
        reading = asyncio.ensure_future(self._read(True))
        watching = asyncio.ensure_future(self._watch_rotation(self.bytes))
        try:
            while not reading.done():
                self._news.clear()
                before = self.bytes
                if self.ended:
                    await asyncio.wait({reading}, timeout=_AFTER_END)
                    if self.bytes == before and not self._showing:
                        break
                    continue
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({reading, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            watching.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)

    async def _watch_rotation(self, since: int) -> None:
        """Learn how the newest file begins, as long as so much comes that the reading may be a file behind, and once a
        file may be full until the next one begins: a node that is busy may leave it out while nothing comes.

        :param since: bytes that were read before the newest file.
        """
        known = None
        while True:
            before = self.bytes
            await asyncio.sleep(_ROTATION_SECONDS)
            if self._showing or self.bytes - before >= _ROTATION_BYTES or self.bytes - since >= _FILE_BYTES:
                with suppress(JobError):
                    stamp = await newest_file(self._cluster, self._path, self._container)
                    if stamp is not None:
                        self._rotation.begins(stamp)
                        since = since if known in (None, stamp) else self.bytes
                        known = stamp

    async def _read(self, follow: bool) -> None:
        """Read to the end; with `follow` that is the container's end, or whenever the server ends it."""
        self._cursor = Cursor.of(self._left())
        self._rotation = Rotation(self._cursor.at)
        params = [("container", self._container), ("timestamps", "true")]
        if follow:
            params.append(("follow", "true"))
        if self._cursor.since:
            params.append(("sinceTime", self._cursor.since))
        async with self._cluster.stream("log", self._path, params, _SILENCE if follow else _READ_SILENCE) as blocks:
            self._readable, self._forbidden = True, None
            lines = Lines(_LINE)
            while block := await self._next(blocks):
                self.bytes += len(block)
                await self._show(self._cursor.take(lines.take(block)))
                if self._log.full:
                    return
            if self.ended:
                # The last words of an ended container may lack their line's end.
                await self._show(self._cursor.take(lines.rest()))
            await self._show(self._cursor.end())

    async def _next(self, blocks: AsyncIterator[bytes]) -> bytes:
        """The next block; none at the end.

        Old lines come without a pause. If one comes while the last known line has not come back, it will not: the
        container is another one, and what the one before said last can be had as long as this one lives.
        """
        if not self._cursor.holding:
            return await anext(blocks, b"")
        reading = asyncio.ensure_future(anext(blocks, b""))
        try:
            await asyncio.wait({reading}, timeout=_HELD_SECONDS)
            if not reading.done():
                await self._show(self._cursor.end())
            return await reading
        finally:
            reading.cancel()

    async def _show(self, batch: Batch) -> None:
        if batch.gap is not None and not await self._close_gap(batch.gap[1]):
            self._gap(_ROTATED, batch.gap)
        for part in self._rotation.parts(batch):
            if part.gap is not None:
                self._gap(_OUTRUN, part.gap)
            if part.lines:
                self._showing = True
                try:
                    await self._log.add(self.name, self.replica, part.lines, partial(self._position_after, part))
                finally:
                    self._showing = False

    async def _close_gap(self, until: int) -> bool:
        """After a restart of the container the missing lines stand in the log of the one before.

        :raises JobError: if that cannot be known for now; nothing after the gap has been shown, so it is found again.
        """
        for _ in range(_PREVIOUS_TRIES):
            try:
                return await self._read_previous(until)
            except NotThereError:
                return False
            except JobForbiddenError:
                raise
            except JobRefusedError:
                await asyncio.sleep(_LOOK_SECONDS[0] / 2)  # a node tells of a restart a moment after it
        return False

    async def _read_earlier(self) -> None:
        """Of a log that is read from its beginning: what the containers before the present one said.

        :raises JobError: if that cannot be known for now; it goes on from where it came to.
        """
        restarts = self._restarts
        if restarts - self._restarts_read > 1:
            self._gap(f"its container was started {restarts + 1} times, and the node keeps the log of the last two")
            self._restarts_read = restarts - 1
        try:
            await self._read_previous()
        except JobForbiddenError:
            raise
        except JobRefusedError:
            self._gap(_ROTATED)
        self._restarts_read = restarts

    def _left(self) -> Mapping[str, Any] | None:
        """Where the log was left, here or by another process; None for another pod's place under this name."""
        left = self._log.positions.get(self.name)
        return left if left is not None and left.get("uid") == self.uid else None

    async def _read_previous(self, until: int | None = None) -> bool:
        """Read on in the log of the container before a restart; whether that log goes on where one had come to."""
        cursor = Cursor.of(self._left())
        since = [("sinceTime", cursor.since)] if cursor.since else []
        params = [("container", self._container), ("timestamps", "true"), ("previous", "true"), *since]
        lines, found = Lines(_LINE), not cursor.at
        async with self._cluster.stream("log", self._path, params, _READ_SILENCE) as blocks:
            while not self._log.full:
                block = await anext(blocks, b"")
                # The last words of an ended container may lack their line's end.
                batch = cursor.take(lines.take(block) if block else lines.rest())
                found = found or not cursor.looking
                if batch.gap is not None:
                    return False
                if batch.lines and (until is None or batch.marks[0][0] < until):
                    await self._log.add(self.name, self.replica, batch.lines, partial(self._position_after, batch))
                if not block:
                    break
        return found

    async def _read_progress(self) -> None:
        """The job's log is full: only its progress is still wanted, and one rank tells it."""
        while self._lead and not self.ended:
            with suppress(JobError):
                await self._tail_into_progress()
            await self._wait(_PROGRESS_SECONDS)
        if self._lead:
            with suppress(JobError):
                await self._tail_into_progress()
        self.done = True

    async def _tail_into_progress(self) -> None:
        for line in await tail(self._cluster, self._path, self._container, 50):
            self._log.learn(line)

    def _position_after(self, batch: Batch, index: int) -> Mapping[str, Any]:
        return self._position(*batch.marks[index])

    def _position(self, at: int, seen: int) -> Mapping[str, Any]:
        return {"uid": self.uid, "at": at, "seen": seen}

    def _gap(self, why: str, between: tuple[int, int] | None = None) -> None:
        since, until = between or (self._cursor.at, 0)
        self._log.gap(self.replica, instant(since) if since else None, instant(until) if until else None, why)

    def _finish(self) -> None:
        self.done = True
        self._log.moved(self.name, {**self._position(self._cursor.at, self._cursor.seen), "done": True})

    def hurry(self) -> None:
        """Its job has ended, and what it has to say is waited for: a pause after an outage is over."""
        self._backoff.reset()
        self._news.set()

    def give_up(self) -> None:
        """Nothing comes any more: say what is missing, unless the pod still runs and simply has nothing to say."""
        if self._forbidden is not None and (self._readable or self.ended):
            self._refused(self._forbidden)
        elif self.ended:
            self._gap("the cluster does not give it")

    def broken(self, error: Exception) -> None:
        """Reading it went wrong in a way that nobody expected."""
        self._gap(f"reading it broke: {error!r}")

    async def _wait(self, seconds: float) -> None:
        self._news.clear()
        await happens(self._news, seconds)


async def tail(cluster: AsyncCluster, path: str, container: str, lines: int) -> list[str]:
    """The last lines of a container's log.

    :raises JobError: if they cannot be had.
    """
    params = [("container", container), ("tailLines", str(lines)), ("limitBytes", str(_LINE * 4))]
    return (await _whole(cluster, path, params)).splitlines()


async def newest_file(cluster: AsyncCluster, path: str, container: str) -> int | None:
    """Stamp of the first line in the newest file of a container's log (nanoseconds since 1970); None without a line.

    :raises JobError: if it cannot be had.
    """
    params = [("container", container), ("timestamps", "true"), ("limitBytes", "64")]
    stamp, space, _ = (await _whole(cluster, path, params)).partition(" ")
    return nanoseconds(stamp) if space else None


async def _whole(cluster: AsyncCluster, path: str, params: list[tuple[str, str]]) -> str:
    async with cluster.stream("log", path, params, _READ_SILENCE) as blocks:
        return b"".join([block async for block in blocks]).decode(errors="replace")


@asynccontextmanager
async def _follows(wish: bool) -> AsyncIterator[bool]:
    """Whether this log may be followed: connections are few."""
    places = _FOLLOWERS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(FOLLOWED))
    if not wish or places.locked():
        yield False
        return
    async with places:
        yield True


def container_status(pod: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    found = items(mapping(mapping(pod).get("status")).get("containerStatuses"))
    return next((item for item in found if item.get("name") == name), {})
