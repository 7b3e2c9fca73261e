"""No room: the write fails with a clear error, what was there stays, and the server goes on."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.stack.conftest import Server

BUCKET = "dropforge"


@pytest.fixture(params=["disk", "file size"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server with room for about two megabytes: a tiny disk of its own, or a limit on the size of files."""
    state = tmp_path / "state"
    if request.param == "file size":
        server = Server(state, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
        yield server.start()
        server.kill()
        return
    state.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(state), b"tmpfs", 0, b"size=2m") != 0:
        pytest.skip("mounting needs root")
    server = Server(state)
    try:
        yield server.start()
    finally:
        server.kill()
        libc.umount2(os.fsencode(state), 2)


def test_a_full_disk_is_said_and_costs_nothing(small: Server) -> None:
    client = small.client()
    key = "drops/f/d/_SUCCESS"
    client.put_object(Bucket=BUCKET, Key=key, Body=b"old")
    big = os.urandom(4 << 20)
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=BUCKET, Key=key, Body=big)
    answer = error.value.response
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 507
    assert answer["Error"]["Code"] == "InsufficientStorage"
    assert "make room" in answer["Error"]["Message"]
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    with pytest.raises(ClientError):
        client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=big)
    assert list((small.state / "objects" / "bodies").iterdir()) == []
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"old"
    client.put_object(Bucket=BUCKET, Key="small", Body=b"goes on")
    with suppress(ClientError):  # until not a byte is left: it starts and can be read all the same
        for number in range(100_000):
            client.put_object(Bucket=BUCKET, Key=f"fill/{number}", Body=b"x" * 1000)
    client = small.restart().client()
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"old"
    assert client.get_object(Bucket=BUCKET, Key="small")["Body"].read() == b"goes on"
    messages = small.client("sqs").receive_message(QueueUrl=small.queue_url, MaxNumberOfMessages=10)["Messages"]
    assert len(messages) == 1


def fill(client: Any, size: int) -> None:
    """Put objects until there is no room for one more."""

    def put_all() -> None:
        for number in range(100_000):
            client.put_object(Bucket=BUCKET, Key=f"f/{size}/{number}", Body=os.urandom(size))

    with pytest.raises(ClientError, match="make room"):
        put_all()


def test_who_may_write_may_make_room_again(small: Server) -> None:
    """By every request that frees some, before and after a restart, however small or large the objects are."""
    client, queue = small.client(), small.client("sqs")
    client.put_object(Bucket=BUCKET, Key="drops/f/d/_SUCCESS", Body=b"")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="parts")["UploadId"]
    client.upload_part(Bucket=BUCKET, Key="parts", UploadId=upload, PartNumber=1, Body=b"x" * 1000)
    (message,) = queue.receive_message(QueueUrl=small.queue_url)["Messages"]
    for size in (100_000, 10_000, 500):
        fill(client, size)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix="f/")["Contents"]
    for item in found[::2]:
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    fill(client, 500)
    queue.delete_message(QueueUrl=small.queue_url, ReceiptHandle=message["ReceiptHandle"])
    client.abort_multipart_upload(Bucket=BUCKET, Key="parts", UploadId=upload)
    fill(client, 500)
    client = small.restart().client()
    found = client.list_objects_v2(Bucket=BUCKET, Prefix="f/")["Contents"]
    keys = [{"Key": item["Key"]} for item in found]
    assert "Errors" not in client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    client.put_object(Bucket=BUCKET, Key="new", Body=os.urandom(max(item["Size"] for item in found)))
