"""One kind of object in one namespace, kept up to date by a list and a watch."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.errors import BackendUnavailableError, JobError, JobRefusedError
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, Backoff, ExpiredError, NotThereError, refusal

log = logging.getLogger(__name__)
PAGE: Final = 200
"""Objects per page of a list: parsing a page never holds up the loop for long."""
_WATCH_SECONDS: Final = (240, 300)  # how long the server may keep one watch open
_SILENCE: Final = 75.0  # bookmarks come every minute; longer silence is a dead connection
_REFUSED_SECONDS: Final = 15.0  # between two lists where watching is not allowed
_WATCH_AGAIN_SECONDS: Final = 120.0  # from a refused watch to the next try: rights change, and a server that starts
_SLICE: Final = 0.01  # seconds of work before others get their turn


@dataclass(frozen=True)
class Handler:
    """What a reflector tells. All calls are quick and do not wait.

    :param listed: the whole of it, as of some moment after the second argument (monotonic seconds).
    :param changed: an item is ADDED, MODIFIED or DELETED.
    :param troubled: the cluster cannot be asked; it is tried again.
    :param well: it answers again.
    """

    listed: Callable[[list[dict[str, Any]], float], None]
    changed: Callable[[str, dict[str, Any]], None]
    troubled: Callable[[JobError], None]
    well: Callable[[], None]


class Reflector:
    """
    :param path: of the collection, like `/api/v1/namespaces/NAMESPACE/pods`.
    :param selector: label selector; empty for all.
    :param wanted: whether to keep an item of a list; what is not kept is never held in memory.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        path: str,
        handler: Handler,
        *,
        selector: str = "",
        wanted: Callable[[dict[str, Any]], bool] = lambda _: True,
        resync_seconds: float = 600.0,
    ) -> None:
        self._cluster, self._path, self._handler, self._wanted = cluster, path, handler, wanted
        self._select = [("labelSelector", selector)] if selector else []
        self._resync = resync_seconds
        self._version: str | None = None
        self._listed_at = 0.0
        self._watch_from = 0.0  # when a refused watch is tried again
        self._watch_refused = False
        self._anew = asyncio.Event()

    def relist(self) -> None:
        """Read the whole list again, soon."""
        self._anew.set()

    async def run(self) -> None:
        """For ever; only cancellation ends it."""
        backoff, expired = Backoff(), False
        while True:
            try:
                if self._version is None or self._anew.is_set():
                    self._anew.clear()
                    self._version = None  # the list is owed until it has been read
                    await self._list()
                    backoff.reset()
                    expired = False
                if time.monotonic() >= self._watch_from:
                    if await self._until_anew(self._watch()):
                        backoff.reset()
                    else:
                        await backoff.wait()  # a watch that ends at once is opened ever more rarely
                else:
                    await self._until_anew(asyncio.sleep(_REFUSED_SECONDS))
                    self._version = None
            except ExpiredError:
                log.info("%s is listed again: its resourceVersion %s has expired", self._path, self._version)
                self._version = None
                if expired or time.monotonic() - self._listed_at < 1:
                    await backoff.wait()
                expired = True
            except (BackendUnavailableError, NotThereError, JobRefusedError) as error:
                self._handler.troubled(error)
                await backoff.wait()
            except Exception as error:  # a broken answer must not end the waiting of a thousand jobs
                log.exception("%s is listed again after an error", self._path)
                self._version = None
                self._handler.troubled(BackendUnavailableError(self._path, repr(error), "It is tried again"))
                await backoff.wait()

    async def _list(self) -> None:
        began = time.monotonic()
        found: list[dict[str, Any]] = []
        more = ""
        while True:
            params = [("limit", str(PAGE)), *self._select, *([("continue", more)] if more else [])]
            page = await self._cluster.json("list", self._path, params)
            found += [slim(item) for item in page.get("items") or () if self._wanted(item)]
            more = page["metadata"].get("continue") or ""
            if not more:
                break
        self._version = page["metadata"]["resourceVersion"]
        self._listed_at = time.monotonic()
        self._handler.listed(found, began)

    async def _watch(self) -> bool:
        """Until the server ends it or it is time to list again; False if it ended at once and brought nothing."""
        left = self._resync * random.uniform(0.9, 1.1) - (time.monotonic() - self._listed_at)  # noqa: S311
        if left <= 0:
            self._version = None
            return True
        seconds = min(random.randint(*_WATCH_SECONDS), max(1, round(left)))  # noqa: S311
        params = [
            ("watch", "1"),
            ("resourceVersion", str(self._version)),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(seconds)),
            *self._select,
        ]
        began, brought = time.monotonic(), False
        try:
            async with self._cluster.stream("watch", self._path, params, _SILENCE) as blocks:
                self._watch_refused = False
                self._handler.well()
                rest = b""
                async for block in blocks:
                    *lines, rest = (rest + block).split(b"\n")
                    turn = time.monotonic()
                    for line in lines:
                        if line:
                            self._take(json.loads(line))
                            brought = True
                        if time.monotonic() - turn > _SLICE:
                            await asyncio.sleep(0)
                            turn = time.monotonic()
        except JobRefusedError as error:
            if not self._watch_refused:
                log.warning("%s cannot be watched, is listed every %g s: %s", self._path, _REFUSED_SECONDS, error)
            self._watch_refused, self._watch_from = True, time.monotonic() + _WATCH_AGAIN_SECONDS
        return brought or time.monotonic() - began > 1

    def _take(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            status = item.get("code") or 500
            raise refusal(self._path, status, json.dumps(item))
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._handler.changed(kind, slim(item))

    async def _until_anew(self, work: Any) -> bool:
        """Do the work, or leave it when a new list is asked for; whether all is well."""
        task, anew = asyncio.ensure_future(work), asyncio.ensure_future(self._anew.wait())
        try:
            await asyncio.wait({task, anew}, return_when=asyncio.FIRST_COMPLETED)
            return bool(await task) if task.done() else True
        finally:
            for item in (task, anew):
                item.cancel()
            await asyncio.gather(task, anew, return_exceptions=True)


def slim(item: dict[str, Any]) -> dict[str, Any]:
    """Without the half of an object that nobody here reads."""
    metadata = item.get("metadata") or {}
    metadata.pop("managedFields", None)
    annotations = metadata.get("annotations")
    if annotations:
        annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return item
