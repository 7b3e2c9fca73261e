"""The notification's way: a drop that is acknowledged has its message, and no kill loses one."""

from __future__ import annotations

import http.client
import json
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any
from urllib.parse import unquote_plus, urlencode

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from dropforge.stack.objects import _health
from dropforge.stack.turn import Turn
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


def ask(server: Server, body: bytes, query: str = "", **headers: str) -> tuple[int, str]:
    """Send what no client would send, signed as it should be."""
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    request = AWSRequest("POST", f"{server.url}/{query}", data=body, headers=told)
    SigV4Auth(Credentials(server.access_key, server.secret_key), "sqs", "us-east-1").add_auth(request)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", f"/{query}", body, dict(request.headers.items()))
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


FORM = "application/x-www-form-urlencoded"
JSON = {"Content_Type": "application/x-amz-json-1.0", "X_Amz_Target": "AmazonSQS.ReceiveMessage"}


@pytest.mark.parametrize("wait", ["4.0", '"+4"', '"0004"', "4", '" 4"', None, "?"])
def test_who_waits_for_messages_holds_nobody(module_server: Server, wait: str | None) -> None:
    server = module_server if module_server.process else module_server.start()
    queue = server.client("sqs").create_queue(QueueName="waited", Attributes={"ReceiveMessageWaitTimeSeconds": "4"})
    body = json.dumps({"QueueUrl": queue["QueueUrl"]})
    if wait == "?":
        told = "?Action=ReceiveMessage&WaitTimeSeconds=%2B4"
        threading.Thread(target=ask, args=(server, b"QueueUrl=waited", told), kwargs={"Content_Type": FORM}).start()
    else:
        told = body if wait is None else f'{body[:-1]}, "WaitTimeSeconds": {wait}}}'
        threading.Thread(target=ask, args=(server, told.encode()), kwargs=JSON).start()
    end, client = time.monotonic() + 0.5, server.client()
    while (began := time.monotonic()) < end:  # the receiver comes while this asks
        client.head_bucket(Bucket=BUCKET)
        assert time.monotonic() - began < 2
    server.client("sqs").send_message(QueueUrl=queue["QueueUrl"], MessageBody="x")  # and it ends


@pytest.mark.parametrize("wait", ["21", "-1", '"abc"', "1e999", "[4]", "{}"])
def test_a_wait_that_is_none_is_refused(module_server: Server, wait: str) -> None:
    server = module_server if module_server.process else module_server.start()
    body = f'{{"QueueUrl": "{server.queue_url}", "WaitTimeSeconds": {wait}}}'
    status, text = ask(server, body.encode(), **JSON)
    assert (status, "InvalidParameterValue" in text) == (400, True), text


def test_a_form_means_to_moto_what_it_means_here(server: Server) -> None:
    queue = server.client("sqs")
    url = queue.create_queue(QueueName="changed")["QueueUrl"]

    def timeout() -> str:
        found = queue.get_queue_attributes(QueueUrl=url, AttributeNames=["VisibilityTimeout"])["Attributes"]
        return str(found["VisibilityTimeout"])

    change = "Action=SetQueueAttributes&QueueUrl=changed&Attribute.1.Name=VisibilityTimeout&Attribute.1.Value=77"
    listed = {"X_Amz_Target": "AmazonSQS.ListQueues"}
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    fields = "".join(part.format(*pair.split("=")) for pair in change.split("&"))
    for body, query, headers in (
        (f"{change}&Action=ListQueues", "", {"Content_Type": FORM}),
        ("Action=ListQueues", f"?{change}", {"Content_Type": FORM}),
        ("Action=ListQueues", f"?{change}", {"Content_Type": "text/plain"}),
        (f"&Action=ListQueues&\r\n{fields}--x--\r\n", "", {"Content_Type": "multipart/form-data; boundary=x"}),
        ("{}", f"?{change}", JSON | listed),
        (json.dumps({"a": f"&{change}&"}), "", JSON | listed),
        (json.dumps({"a": f"&{change}&"}), "", JSON | listed | {"Content_Type": FORM}),
    ):
        ask(server, body.encode(), query, **headers)
        assert timeout() == "30", (body, query, headers)
    assert ask(server, change.encode(), Content_Type=FORM)[0] == 200
    assert timeout() == "77"
    server.restart()
    assert timeout() == "77"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"Action=SetQueueAttributes&Action=ListQueues", {"Content_Type": FORM}),
        (
            b"Action=SendMessageBatch&" + b"&".join(b"E.%d.Id=a" % number for number in range(1000)),
            {"Content_Type": FORM},
        ),
        (b"a&" * (1 << 20), {"Content_Type": FORM}),
        (b"Action=ListQueues&QueueUrl=" + b"x" * (5 << 20), {"Content_Type": FORM}),
        (b"[" * (1 << 20), JSON),
        (b'{"a":' * 200_000, JSON),
        (b'{"a": [' + b"{}," * 100_000 + b"{}]}", JSON),
        (b"[1]", JSON),
        (b'{"QueueUrl": [1], "MaxNumberOfMessages": {}}', JSON),
        (b"{", JSON),
    ],
)
def test_a_request_that_would_take_long_is_refused(module_server: Server, body: bytes, headers: dict[str, str]) -> None:
    server = module_server if module_server.process else module_server.start()
    assert ask(server, body, **headers)[0] == 400
    assert "Traceback" not in (server.state / "objects.log").read_text()


def test_the_largest_batch_is_taken(server: Server) -> None:
    attributes = {f"a{number}": {"DataType": "String", "StringValue": "é"} for number in range(10)}
    entries = [
        {"Id": str(number), "MessageBody": "é" * 10_000, "DelaySeconds": 0, "MessageAttributes": attributes}
        for number in range(10)
    ]
    sent = server.client("sqs").send_message_batch(QueueUrl=server.queue_url, Entries=entries)
    assert len(sent["Successful"]) == 10
    fields = {"Action": "SendMessageBatch", "QueueUrl": "dropforge-drops"}
    for number in range(1, 11):
        entry = f"SendMessageBatchRequestEntry.{number}"
        fields |= {f"{entry}.Id": str(number), f"{entry}.MessageBody": "é" * 10_000, f"{entry}.DelaySeconds": "0"}
        for name in range(1, 11):
            attribute = f"{entry}.MessageAttribute.{name}"
            told = {"Name": f"a{name}", "Value.DataType": "String", "Value.StringValue": "é"}
            fields |= {f"{attribute}.{key}": value for key, value in told.items()}
    status, text = ask(server, urlencode(fields).encode(), Content_Type=FORM)
    assert (status, text.count("<MessageId>")) == (200, 10), text


def test_health_tells_of_a_turn_that_does_not_end() -> None:
    turn = Turn()
    assert turn.held() == 0
    with turn, turn:
        began = turn.held()
        turn.wait(0.05)
        assert 0 <= turn.held() < 0.05 + began
    assert turn.held() == 0
    assert _health(59)[0] == "200 OK"
    assert _health(61)[0] == "503 Service Unavailable"
