"""The drop trigger in the triggerer's own stream manager, on a real queue and bucket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from airflow.triggers.base import TriggerEvent
from airflow.triggers.shared_stream import SharedStreamManager
from dropforge_airflow.events import read_message
from dropforge_airflow.triggers.drops import DropTrigger

from dropforge import in_flight, layout
from dropforge.inbox import digest, found_body
from dropforge.store import S3Store

from .conftest import Yard


class Runner:
    """What the triggerer does with one trigger: takes its events, and confirms them once they are stored."""

    def __init__(self, trigger: DropTrigger, *, storing: bool = True) -> None:
        self.trigger, self.storing = trigger, storing
        self.events: list[dict[str, int]] = []
        self.manager = SharedStreamManager()

    async def run(self) -> None:
        key = self.trigger.shared_stream_key()
        stream = self.manager.subscribe(trigger_id=1, trigger=self.trigger, key=key)
        try:
            async for event in self.trigger.filter_shared_stream(stream):
                assert isinstance(event, TriggerEvent)
                number = self.manager.bind_pending_event(trigger_id=1, key=key)
                self.events.append(event.payload)
                if self.storing and number is not None:
                    asyncio.get_running_loop().call_soon(self.manager.confirm_persisted, [number])
        finally:
            await self.manager.unsubscribe(1, key)


@asynccontextmanager
async def running(trigger: DropTrigger, *, storing: bool = True) -> AsyncIterator[Runner]:
    runner = Runner(trigger, storing=storing)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def until(what: Callable[[], Any], seconds: float = 20) -> Any:
    async def look() -> Any:
        while not (value := await asyncio.to_thread(what)):  # noqa: ASYNC110 - the other side is a real service
            await asyncio.sleep(0.02)
        return value

    return await asyncio.wait_for(look(), seconds)


def do(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def inbox(yard: Yard) -> list[str]:
    return [info.key for info in yard.store.list(layout.INBOX)]


def test_a_finished_drop_lies_in_the_inbox_before_the_wake_and_its_message_goes_after(yard: Yard) -> None:
    async def test() -> None:
        async with running(DropTrigger()) as runner:
            yard.upload("fam", "d1")
            await until(lambda: runner.events)
            assert len(inbox(yard)) == 1
            await until(lambda: yard.left() == 0)
        assert runner.events == [{"messages": 1}]
        body = json.loads(yard.store.get(inbox(yard)[0]))["body"]
        assert "drops/fam/d1/_SUCCESS" in body.replace("%2F", "/")

    do(test)


def test_a_message_is_not_deleted_before_its_event_is_stored_and_comes_again(yard: Yard) -> None:
    async def test() -> None:
        yard.sqs.set_queue_attributes(QueueUrl=yard.queue_url, Attributes={"VisibilityTimeout": "1"})
        yard.upload("fam", "d1")
        async with running(DropTrigger(), storing=False) as runner:  # the triggerer dies before it stores the event
            await until(lambda: runner.events)
            await until(lambda: yard.left() == 1)  # the data file's message, which tells nothing, is gone
        assert yard.left() == 1
        async with running(DropTrigger()) as again:
            await until(lambda: again.events)
            await until(lambda: yard.left() == 0)
        assert again.events[0] == {"messages": 1}
        assert len(inbox(yard)) == 1  # the same message has the same place

    do(test)


def test_messages_that_tell_nothing_are_deleted_without_a_wake(yard: Yard) -> None:
    async def test() -> None:
        yard.send(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": yard.bucket}))
        yard.store.put("drops/fam/d1/a.jsonl", b"x")
        yard.store.put("somewhere/_SUCCESS", b"")
        async with running(DropTrigger()) as runner:
            await until(lambda: yard.left() == 0)
        assert runner.events == []
        assert inbox(yard) == []
        assert yard.dead() == []

    do(test)


def test_what_is_no_s3_event_goes_to_the_dead_letters_with_its_reason(yard: Yard) -> None:
    async def test() -> None:
        for body in ("hello", '{"a": 1}', '{"Records": [{"eventSource": "aws:sqs"}]}'):
            yard.send(body)
        yard.upload("fam", "d1")
        async with running(DropTrigger()) as runner:
            await until(lambda: len(yard.dead()) == 3 and yard.left() == 0)
            await until(lambda: runner.events)
        reasons = {
            letter["Body"]: letter["MessageAttributes"]["dropforge.reason"]["StringValue"] for letter in yard.dead()
        }
        assert "not JSON" in reasons["hello"]
        assert "no Records" in reasons['{"a": 1}']
        assert len(inbox(yard)) == 1

    do(test)


def test_without_a_dead_letter_queue_bad_messages_are_kept_in_the_bucket(yard: Yard) -> None:
    async def test() -> None:
        yard.sqs.set_queue_attributes(QueueUrl=yard.queue_url, Attributes={"RedrivePolicy": ""})
        yard.send("hello")
        async with running(DropTrigger()):
            await until(lambda: yard.left() == 0)
        kept = [json.loads(yard.store.get(info.key)) for info in yard.store.list(layout.MESSAGES)]
        assert [record["body"] for record in kept] == ["hello"]
        assert "not JSON" in kept[0]["reason"]

    do(test)


def test_a_bad_message_that_leaves_no_room_for_a_reason_is_kept_in_the_bucket(yard: Yard) -> None:
    async def test() -> None:
        yard.send("x" * 262_000)
        async with running(DropTrigger()):
            await until(lambda: yard.left() == 0)
        (kept,) = [json.loads(yard.store.get(info.key)) for info in yard.store.list(layout.MESSAGES)]
        assert kept["body"] == "x" * 262_000
        assert "not JSON" in kept["reason"]
        assert yard.dead() == []

    do(test)


def test_a_queue_that_loses_drops_is_told_once_at_the_start(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        yard.sqs.set_queue_attributes(QueueUrl=yard.queue_url, Attributes={"MessageRetentionPeriod": "60"})
        async with running(DropTrigger()) as runner:
            yard.upload("fam", "d1")
            await until(lambda: runner.events)
        told = [record for record in caplog.records if "MessageRetentionPeriod is 60 s" in record.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING]

    with caplog.at_level(logging.INFO):
        do(test)


def test_many_messages_at_once_are_all_kept(yard: Yard) -> None:
    async def test() -> None:
        for number in range(30):
            yard.upload("fam", f"d{number}")
        async with running(DropTrigger()) as runner:
            await until(lambda: yard.left() == 0, 40)
        assert len(inbox(yard)) == 30
        assert sum(event["messages"] for event in runner.events) == 30

    do(test)


@pytest.mark.parametrize("key", [layout.inbox_key("x"), layout.pending_key("fam", "x")])
def test_what_waits_too_long_is_woken_again_without_a_message(yard: Yard, key: str) -> None:
    async def test() -> None:
        yard.store.put(key, b"{}")
        async with running(DropTrigger(nudge_after=0.2)) as runner:
            await until(lambda: len(runner.events) >= 2)
            yard.store.delete(key)
        assert runner.events[0] == {"waiting": 1}

    do(test)


def names(yard: Yard) -> set[str]:
    """The drops that the inbox tells of."""
    bodies = [json.loads(yard.store.get(key))["body"] for key in inbox(yard)]
    return {event.key.split("/")[2] for body in bodies for event in read_message(body)}


def settled(yard: Yard, drop: str) -> bool:
    """Whether polling has seen the drop's `_SUCCESS` after the second in which it was written."""
    (item,) = yard.store.client.list_objects_v2(Bucket=yard.bucket, Prefix=f"drops/fam/{drop}/_SUCCESS")["Contents"]
    body = found_body(yard.bucket, item["Key"], item["ETag"], item["LastModified"].isoformat())
    return yard.store.stat(layout.SEEN + digest(body)) is not None


def test_without_a_queue_the_prefix_is_polled_and_what_was_seen_stays_seen(yard: Yard) -> None:
    async def test() -> None:
        yard.upload("fam", "d1")
        trigger = DropTrigger(queue_url="", bucket=yard.bucket, poll_every=0.1)
        async with running(trigger) as runner:
            await until(lambda: runner.events)
            assert runner.events[0] == {"found": 1}
            yard.upload("fam", "d2")
            await until(lambda: settled(yard, "d1") and settled(yard, "d2"))
        assert names(yard) == {"d1", "d2"}
        for key in inbox(yard):
            yard.store.delete(key)
        async with running(trigger) as again:  # a restart does not begin anew
            yard.upload("fam", "d3")
            await until(lambda: again.events)
        assert names(yard) == {"d3"}

    do(test)


def test_polling_sees_a_second_upload_within_the_second_of_the_first(yard: Yard) -> None:
    """S3 tells times in whole seconds, and an empty `_SUCCESS` has always the same tag."""

    async def test() -> None:
        async with running(DropTrigger(queue_url="", bucket=yard.bucket, poll_every=0.1)) as runner:
            yard.upload("fam", "d1")
            await until(lambda: runner.events)
            for key in inbox(yard):  # intake has been here
                yard.store.delete(key)
            yard.upload("fam", "d1", '{"text": "other"}')
            await until(lambda: inbox(yard))

    do(test)


def test_several_buckets_and_queues_are_one_stream_and_strangers_are_dead_letters(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        other = f"{yard.bucket}-other"
        yard.store.client.create_bucket(Bucket=other)
        urls = [yard.queue_url, yard.sqs.create_queue(QueueName=other)["QueueUrl"]]
        monkeypatch.setenv("DROPFORGE_DROP_BUCKETS", f"eu={other}")
        monkeypatch.setenv("DROPFORGE_QUEUE_URL", f"{yard.queue_url}-missing, {' '.join(urls)}")
        yard.sqs.send_message(QueueUrl=urls[1], MessageBody=_event(other))
        yard.send(_event("stranger"))
        # One queue that is not there holds up no other.
        async with running(DropTrigger()) as runner:
            yard.upload("fam", "d2")
            await until(lambda: names(yard) == {"d1", "d2"} and yard.left() == 0)
            await until(lambda: sum(event.get("messages", 0) for event in runner.events) == 2)
            left = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            await until(
                lambda: (
                    set(yard.sqs.get_queue_attributes(QueueUrl=urls[1], AttributeNames=left)["Attributes"].values())
                    == {"0"}
                )
            )
        (letter,) = yard.dead()
        told = letter["MessageAttributes"]["dropforge.reason"]["StringValue"]
        assert told == f"it is about bucket 'stranger', and drops come from '{yard.bucket}', '{other}'"

    do(test)


def test_a_bucket_that_tells_through_a_topic(yard: Yard) -> None:
    """S3, SNS and SQS themselves: what they really send is read, repeated and out of order too."""

    async def test() -> None:
        sns = boto3.session.Session().client("sns")
        topic = sns.create_topic(Name=yard.bucket)["TopicArn"]
        arn = yard.sqs.get_queue_attributes(QueueUrl=yard.queue_url, AttributeNames=["QueueArn"])["Attributes"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn["QueueArn"])
        told: Any = {"TopicConfigurations": [{"TopicArn": topic, "Events": ["s3:ObjectCreated:*"]}]}
        yard.store.client.put_bucket_notification_configuration(Bucket=yard.bucket, NotificationConfiguration=told)
        for name in ("d1", "d 2", "d3"):  # the second is no drop's name
            yard.store.put(f"drops/fam/{name}/a+b c.jsonl", b"x")
            yard.store.put(f"drops/fam/{name}/_SUCCESS", b"")
        held = []
        while batch := yard.sqs.receive_message(
            QueueUrl=yard.queue_url, MaxNumberOfMessages=10, VisibilityTimeout=60
        ).get("Messages"):
            held += batch
        assert all(json.loads(message["Body"])["Type"] == "Notification" for message in held)
        for message in (*reversed(held), *held):
            yard.send(message["Body"])
        yard.send(json.dumps({"Type": "Notification", "Message": _event("stranger")}))
        for message in held:
            yard.sqs.delete_message(QueueUrl=yard.queue_url, ReceiptHandle=message["ReceiptHandle"])
        async with running(DropTrigger()):
            await until(lambda: yard.left() == 0, 40)
        assert names(yard) == {"d1", "d3"}
        assert len(inbox(yard)) == 2
        (letter,) = yard.dead()
        assert "it is about bucket 'stranger'" in letter["MessageAttributes"]["dropforge.reason"]["StringValue"]

    do(test)


def test_without_a_queue_all_buckets_are_polled(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        other = f"{yard.bucket}-other"
        yard.store.client.create_bucket(Bucket=other)
        monkeypatch.setenv("DROPFORGE_DROP_BUCKETS", other)
        monkeypatch.setenv("DROPFORGE_QUEUE_URL", "")
        yard.upload("fam", "d1")
        S3Store(other, client=yard.store.client).put("drops/fam/d2/_SUCCESS", b"")
        async with running(DropTrigger(poll_every=0.1)):
            await until(lambda: names(yard) == {"d1", "d2"})

    do(test)


def test_what_a_family_s_rules_hold_wakes_nobody_until_its_time(yard: Yard) -> None:
    async def test() -> None:
        for family in ("held", "other"):
            yard.store.put(layout.pending_key(family, "x"), b"{}")
        until_then = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
        yard.store.put(layout.rules_key("held"), json.dumps({"announced": {}, "until": until_then}).encode())
        async with running(DropTrigger(nudge_after=0.2)) as runner:
            await until(lambda: len(runner.events) >= 2)
            assert runner.events[:2] == [{"waiting": 1}] * 2
            yard.store.delete(layout.pending_key("other", "x"))
            yard.store.put(layout.rules_key("held"), b"torn")
            seen = len(runner.events)
            await until(lambda: len(runner.events) >= seen + 2)  # one of them may have been on its way for the other

    do(test)


def test_a_missing_queue_is_waited_for_with_one_line(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        url = yard.queue_url + "-later"
        async with running(DropTrigger(queue_url=url, bucket=yard.bucket)) as runner:
            await until(lambda: "does not exist" in caplog.text)
            await asyncio.sleep(1.5)  # long enough for a second try, which must say nothing new
            yard.sqs.create_queue(QueueName=url.rpartition("/")[2])
            yard.sqs.send_message(QueueUrl=url, MessageBody=_event(yard.bucket))
            await until(lambda: runner.events)
            await until(lambda: "works again" in caplog.text)

    with caplog.at_level(logging.INFO, logger="dropforge_airflow"):
        do(test)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is None
    assert "Create it, or fix DROPFORGE_QUEUE_URL" in errors[0].getMessage()


def test_an_address_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("DROPFORGE_BUCKET", raising=False)

    async def test() -> None:
        async with running(DropTrigger()):
            await until(lambda: "DROPFORGE_BUCKET" in caplog.text)

    do(test)


def test_the_stored_trigger_holds_no_address_and_no_secret() -> None:
    path, kwargs = DropTrigger().serialize()
    assert path == "dropforge_airflow.triggers.drops.DropTrigger"
    assert kwargs == {
        "queue_url": None,
        "bucket": None,
        "aws_conn_id": "dropforge_s3",
        "nudge_after": 20.0,
        "poll_every": 5.0,
    }
    assert DropTrigger(**kwargs).serialize() == (path, kwargs)


def _event(bucket: str) -> str:
    entry = {"bucket": {"name": bucket}, "object": {"key": "drops/fam/d1/_SUCCESS"}}
    return json.dumps({"Records": [{"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "s3": entry}]})


def test_a_run_that_ends_while_drops_wait_wakes_at_once(yard: Yard) -> None:
    async def test() -> None:
        for number in range(2):
            in_flight.enter(yard.store, "fam", f"{number}")
        yard.store.put(layout.pending_key("fam", "waits"), b"{}")
        async with running(DropTrigger(poll_every=0.1, nudge_after=2)) as runner:
            await until(lambda: {"waiting": 1} in runner.events)
            in_flight.enter(yard.store, "fam", "2")  # a run that begins wakes nobody
            in_flight.leave(yard.store, "fam", "0")
            await until(lambda: {"ended": 1} in runner.events)
            seen = len(runner.events)
            await until(lambda: len(runner.events) > seen)  # and soon after, in case that Airflow was behind
        assert runner.events.count({"ended": 1}) == 1
        assert runner.events[-1] == {"waiting": 1}

    do(test)
