"""The watcher of the asset `dropforge_inbox`: wakes the intake DAG when a drop is finished.

At least once, by order of writing: the message goes to the inbox in S3, then one small event wakes, and only when
Airflow has stored that event is the message deleted from the queue. The inbox is the truth, so an event that Airflow
loses afterwards costs time, never a drop: whatever waits too long is woken again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

from dropforge_airflow.backlog import Backlog
from dropforge_airflow.connection import CONNECTION
from dropforge_airflow.triggers.patience import Patience, in_thread

if TYPE_CHECKING:
    from dropforge_airflow.triggers.post import Post

log = logging.getLogger(__name__)

Receipts = tuple[int, tuple[str, ...]]
"""Which queue, and receipts of messages of it."""

_NOTHING: Receipts = (0, ())
_LONG_POLL = 20.0  # seconds, the most that SQS allows


class DropTrigger(BaseEventTrigger):
    """Emits a wake event when drops are finished or have waited too long; the payload holds nothing but counts.

    Addresses that are not given are read from the environment where the trigger runs (`DROPFORGE_BUCKET`,
    `DROPFORGE_DROP_BUCKETS`, `DROPFORGE_QUEUE_URL`), so that another port or queue changes neither the DAG nor the
    stored trigger.

    :param queue_url: SQS queues that the buckets notify. Where there is none, the prefix `drops/` is polled.
    :param bucket: S3 bucket of the ledger, and of the drops if it is given.
    :param aws_conn_id: Airflow connection for S3 and SQS; credentials live there, never here.
    :param nudge_after: seconds after which something that still waits is woken again; the pause doubles to a minute.
    :param poll_every: seconds between two looks at `drops/` where there is no queue, and at the runs that must end
        before what waits may go on.
    """

    def __init__(
        self,
        *,
        queue_url: str | None = None,
        bucket: str | None = None,
        aws_conn_id: str = CONNECTION,
        nudge_after: float = 20.0,
        poll_every: float = 5.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queue_url = queue_url
        self.bucket = bucket
        self.aws_conn_id = aws_conn_id
        self.nudge_after = nudge_after
        self.poll_every = poll_every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "dropforge_airflow.triggers.drops.DropTrigger",
            {
                "queue_url": self.queue_url,
                "bucket": self.bucket,
                "aws_conn_id": self.aws_conn_id,
                "nudge_after": self.nudge_after,
                "poll_every": self.poll_every,
            },
        )

    def shared_stream_key(self) -> Hashable:
        return ("dropforge-drops", self.queue_url, self.bucket, self.aws_conn_id, self.nudge_after, self.poll_every)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return DropProducer(**kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for counts in shared_stream:
            yield TriggerEvent(counts)  # type: ignore[no-untyped-call]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        # Without the acknowledging stream there is no moment at which a message may be deleted.
        raise NotImplementedError("DropTrigger needs the shared event streams of Airflow 3.3")
        yield


class DropProducer(SharedStreamProducer):
    """Reads the queue and deletes what Airflow has stored. Troubles are waited out here, with one line each."""

    def __init__(
        self,
        *,
        queue_url: str | None,
        bucket: str | None,
        aws_conn_id: str = CONNECTION,
        nudge_after: float = 20.0,
        poll_every: float = 5.0,
    ) -> None:
        self._where = (queue_url, bucket, aws_conn_id)
        self._nudge_after = nudge_after
        self._poll_every = poll_every
        self._posts: tuple[Post, ...] = ()

    async def open_stream(self) -> AsyncIterator[tuple[dict[str, int], Receipts]]:
        """Yield (counts, which messages are behind them) for ever."""
        patience = Patience("Drop intake", log)
        while not self._posts:
            try:
                self._posts = await in_thread(_open_posts, *self._where)
            except Exception as error:
                await asyncio.sleep(patience.pause(error))
        patience.over()
        # One at a time: what nobody has taken yet holds up its queue, and stays in it.
        news: asyncio.Queue[tuple[dict[str, int], Receipts]] = asyncio.Queue(1)
        readers = [self._collect(number, news) for number, post in enumerate(self._posts) if post.queue_url]
        tasks = [asyncio.create_task(reader) for reader in (*readers, self._watch(self._posts[0], news))]
        try:
            while True:
                yield await news.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _collect(self, number: int, news: asyncio.Queue[tuple[dict[str, int], Receipts]]) -> None:
        """Read a queue; its troubles hold up no other."""
        post, patience, checked = self._posts[number], Patience("Drop intake", log), False
        while True:
            try:
                if not checked:
                    await in_thread(post.check, _ack_timeout())
                    checked = True
                batch = await in_thread(post.collect, _LONG_POLL)
                if batch.receipts:
                    await news.put(({"messages": len(batch.receipts)}, (number, batch.receipts)))
                if batch.error is not None:
                    raise batch.error
                patience.over()
            except Exception as error:
                post.forget()
                await asyncio.sleep(patience.pause(error))

    async def _watch(self, post: Post, news: asyncio.Queue[tuple[dict[str, int], Receipts]]) -> None:
        """Look at what waits in the ledger, and at `drops/` where there is no queue."""
        patience, backlog = Patience("Drop intake's look at the bucket", log), Backlog(after=self._nudge_after)
        flying: set[str] = set()
        while True:
            try:
                found = 0 if post.queue_url else await in_thread(post.look)
                waiting = await in_thread(post.waiting)
                before, flying = flying, set(await in_thread(post.in_flight)) if waiting else set()
                late, ended = backlog.overdue(waiting, time.monotonic()), len(before - flying) if waiting else 0
                if found:
                    await news.put(({"found": found}, _NOTHING))
                elif ended:
                    log.info("%d runs have ended while drops wait: waking intake", ended)
                    backlog.look_soon(time.monotonic())  # Airflow may count these runs a moment longer
                    await news.put(({"ended": ended}, _NOTHING))
                elif late:
                    log.info("%d waiting in the ledger: waking intake again", late)
                    await news.put(({"waiting": late}, _NOTHING))
                patience.over()
                await asyncio.sleep(self._nudge_after / 2 if post.queue_url and not flying else self._poll_every)
            except Exception as error:
                await asyncio.sleep(patience.pause(error))

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Delete the messages whose event is stored; the others come again by themselves."""
        for item in batch:
            number, receipts = item.broker_payload
            if not receipts or not item.outcome.is_clean:
                continue
            try:
                await in_thread(self._posts[number].delete, receipts)
            except Exception as error:
                # Raising would end the stream; the message merely comes again and finds its work done.
                log.warning("%d messages could not be deleted and will come again: %s", len(receipts), error)

    def get_advance_lane(self, broker_payload: Receipts) -> Hashable:
        return broker_payload  # no order to keep: no batch waits for another

    async def aclose(self) -> None:
        for post in self._posts:
            post.close()


def _ack_timeout() -> float:
    from airflow.configuration import conf

    return float(conf.getfloat("triggerer", "shared_stream_ack_timeout", fallback=300.0))


def _open_posts(queue_url: str | None, bucket: str | None, aws_conn_id: str) -> tuple[Post, ...]:
    """Open the queues and the bucket; slow imports happen here, off the event loop."""
    from dropforge_airflow.triggers.post import Post

    return Post.open(queue_url, bucket, aws_conn_id)
