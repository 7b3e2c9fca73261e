"""The least trigger that loses no message: what every way from S3 into Airflow by events has to do.

It reads the queue, gives each message to Airflow as an event, and deletes it when the event is stored. It has no
inbox, no dead letters and no patience, so `bench.latency` measures with it what Airflow itself takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

CONNECTION = "bench_s3"
WAIT = 20  # seconds of a long poll, as those of `dropforge_airflow.triggers.drops` have


class BareTrigger(BaseEventTrigger):
    """One event per message. :param queue: the queue's name."""

    def __init__(self, *, queue: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queue = queue

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "bench.bare_chain.BareTrigger", {"queue": self.queue}

    def shared_stream_key(self) -> Hashable:
        return "bench-bare", self.queue

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return BareProducer(**kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for body in shared_stream:
            yield TriggerEvent(body)  # type: ignore[no-untyped-call]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise NotImplementedError
        yield


class BareProducer(SharedStreamProducer):
    """Reads the queue, and deletes what is stored."""

    def __init__(self, *, queue: str) -> None:
        self._queue = queue
        self._client: Any = None
        self._url = ""

    async def open_stream(self) -> AsyncIterator[tuple[str, str]]:
        from dropforge_airflow import connection

        self._client = await asyncio.to_thread(connection.sqs, CONNECTION)
        self._url = (await asyncio.to_thread(self._client.get_queue_url, QueueName=self._queue))["QueueUrl"]
        while True:
            answer = await asyncio.to_thread(
                self._client.receive_message, QueueUrl=self._url, MaxNumberOfMessages=10, WaitTimeSeconds=WAIT
            )
            for message in answer.get("Messages", []):
                yield message["Body"], message["ReceiptHandle"]

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            if item.outcome.is_clean:
                await asyncio.to_thread(
                    self._client.delete_message, QueueUrl=self._url, ReceiptHandle=item.broker_payload
                )

    def get_advance_lane(self, broker_payload: Any) -> Hashable:
        return str(broker_payload)

    async def aclose(self) -> None:
        """The client needs no closing."""
