"""The notification's way: a drop that is acknowledged has its message, and no kill loses one."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any
from urllib.parse import unquote_plus

import pytest
from botocore.exceptions import ClientError

from tests.stack.conftest import Server

BUCKET = "dropforge"


@pytest.fixture
def server(server: Server) -> Server:
    """The same, without messages."""
    server.kill()
    with closing(sqlite3.connect(server.state / "objects" / "objects.db", isolation_level=None)) as database:
        database.execute("DELETE FROM messages")
    return server.start()


def receive(server: Server, **options: Any) -> list[dict[str, Any]]:
    answer = server.client("sqs").receive_message(QueueUrl=server.queue_url, MaxNumberOfMessages=10, **options)
    return list(answer.get("Messages", []))


def keys(messages: list[dict[str, Any]]) -> list[str]:
    records = [record for message in messages for record in json.loads(message["Body"])["Records"]]
    return [unquote_plus(record["s3"]["object"]["key"]) for record in records]


def test_only_success_objects_under_drops_are_told(server: Server) -> None:
    client = server.client()
    for key in ("drops/f/d/a.jsonl", "other/_SUCCESS", "drops/f/ü d+1/_SUCCESS"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    assert keys(receive(server)) == ["drops/f/ü d+1/_SUCCESS"]


def test_an_upload_in_parts_and_a_copy_are_told_once(server: Server) -> None:
    client = server.client()
    key = "drops/f/d/_SUCCESS"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"[]")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload=parts)
    client.copy_object(Bucket=BUCKET, Key="drops/f/e/_SUCCESS", CopySource={"Bucket": BUCKET, "Key": key})
    assert keys(receive(server)) == [key, "drops/f/e/_SUCCESS"]


def test_a_refused_write_sends_no_message(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="drops/f/d/_SUCCESS", Body=b"")
    with pytest.raises(ClientError):
        client.put_object(Bucket=BUCKET, Key="drops/f/d/_SUCCESS", Body=b"", IfNoneMatch="*")
    assert len(receive(server)) == 1


def test_messages_unread_or_in_flight_survive_and_deleted_ones_do_not(server: Server) -> None:
    client = server.client()
    for name in ("read", "flying", "waiting"):
        client.put_object(Bucket=BUCKET, Key=f"drops/f/{name}/_SUCCESS", Body=b"")
    queue = server.client("sqs")
    for _ in range(2):
        message = queue.receive_message(QueueUrl=server.queue_url, VisibilityTimeout=600)["Messages"][0]
        if "read" in message["Body"]:
            queue.delete_message(QueueUrl=server.queue_url, ReceiptHandle=message["ReceiptHandle"])
    attributes = {
        "kind": {"DataType": "String", "StringValue": "x"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    queue.send_message(QueueUrl=server.queue_url, MessageBody="by hand", MessageAttributes=attributes)
    server.restart()
    messages = receive(server, MessageAttributeNames=["All"])
    assert keys(messages[:-1]) == ["drops/f/flying/_SUCCESS", "drops/f/waiting/_SUCCESS"]
    assert messages[-1]["Body"] == "by hand"
    assert messages[-1]["MessageAttributes"]["kind"]["StringValue"] == "x"
    assert messages[-1]["MessageAttributes"]["raw"]["BinaryValue"] == b"\0\xff"


def test_what_cannot_be_handled_goes_to_the_dead_letters_and_stays_there(server: Server) -> None:
    queue = server.client("sqs")
    queue.send_message(QueueUrl=server.queue_url, MessageBody="poison")
    for _ in range(5):
        assert len(receive(server, VisibilityTimeout=0)) == 1
    assert receive(server) == []
    server.restart()
    assert receive(server) == []
    dead = server.client("sqs").receive_message(QueueUrl=f"{server.queue_url}-dead")["Messages"]
    assert [message["Body"] for message in dead] == ["poison"]


def test_purged_messages_do_not_come_back(server: Server) -> None:
    queue = server.client("sqs")
    queue.send_message(QueueUrl=server.queue_url, MessageBody="x")
    queue.purge_queue(QueueUrl=server.queue_url)
    server.restart()
    assert receive(server) == []


def test_a_waiting_receiver_is_woken_at_once(server: Server) -> None:
    def send() -> None:
        server.client().put_object(Bucket=BUCKET, Key="drops/f/d/_SUCCESS", Body=b"")

    threading.Timer(0.3, send).start()
    began = time.monotonic()
    assert len(receive(server, WaitTimeSeconds=15)) == 1
    assert time.monotonic() - began < 10


def test_queues_of_ones_own_are_kept(server: Server) -> None:
    queue = server.client("sqs")
    url = queue.create_queue(QueueName="another.fifo", Attributes={"FifoQueue": "true", "VisibilityTimeout": "7"})
    url = url["QueueUrl"]
    sent = queue.send_message(QueueUrl=url, MessageBody="x", MessageGroupId="g", MessageDeduplicationId="d")
    queue = server.restart().client("sqs")
    attributes = queue.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert (attributes["VisibilityTimeout"], attributes["ApproximateNumberOfMessages"]) == ("7", "1")
    assert queue.receive_message(QueueUrl=url)["Messages"][0]["MessageId"] == sent["MessageId"]
    queue.delete_queue(QueueUrl=url)
    queue = server.restart().client("sqs")
    assert [found.rpartition("/")[2] for found in queue.list_queues()["QueueUrls"]] == [
        "dropforge-drops-dead",
        "dropforge-drops",
    ]


def test_the_stacks_own_queues_stay(server: Server) -> None:
    with pytest.raises(ClientError, match="stay"):
        server.client("sqs").delete_queue(QueueUrl=server.queue_url)
    server.client("s3").put_object(Bucket=BUCKET, Key="drops/f/d/_SUCCESS", Body=b"")
    assert len(receive(server)) == 1
