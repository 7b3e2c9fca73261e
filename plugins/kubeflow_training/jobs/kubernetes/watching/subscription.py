"""One who waits for one job, and what is known of the job at a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.kubernetes.client import AsyncCluster
from kubeflow_training.jobs.waiting.signals import happens

if TYPE_CHECKING:
    from kubeflow_training.jobs.kubernetes.watching.feed import Feed


@dataclass(frozen=True)
class Look:
    """What is known of a job at this moment.

    :param known: whether the cluster has been asked about it since the waiting began.
    :param snapshot: the job with its pods and events; None if there is no such job.
    :param trouble: why the cluster cannot be asked at the moment.
    """

    known: bool
    snapshot: Snapshot | None = None
    trouble: JobError | None = None


class Subscription:
    """One who waits for one job. Made by `Feed.subscribe`; has to be closed."""

    def __init__(self, feed: Feed, name: str, uid: str | None) -> None:
        self._feed, self.name, self.uid = feed, name, uid
        self._event = asyncio.Event()
        self.since = time.monotonic()
        self.waiting = False
        self.final: Snapshot | None = None
        """The job as it was when it was deleted."""

    @property
    def cluster(self) -> AsyncCluster:
        return self._feed.cluster

    def look(self) -> Look:
        return self._feed.look(self)

    def notify(self) -> None:
        self._event.set()

    async def changed(self, within: float | None = None) -> bool:
        """Wait for a change since the last call; whether there was one in time."""
        news = await happens(self._event, within)
        if news:
            self._event.clear()
        return news

    async def last_words(self, uid: str) -> list[Mapping[str, Any]]:
        """Events of a job that is gone, which may tell how it ended.

        :raises JobError: if the cluster cannot be asked.
        """
        return await self._feed.events.last_words(uid)

    async def refresh(self) -> None:
        """Read job, pods and events now; what a watch has not told yet may explain a failure.

        :raises JobError: if the cluster cannot be asked.
        """
        await self._feed.refresh(self)

    def waits(self, waiting: bool) -> None:
        """Whether the job waits for something: then events are read, which may say for what."""
        if waiting and not self.waiting:
            self._feed.events.wanted.set()
        self.waiting = waiting

    async def close(self) -> None:
        await self._feed.unsubscribe(self)
