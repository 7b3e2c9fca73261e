"""What the embedded store of earlier versions kept is there after an upgrade, whatever was killed meanwhile."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from pathlib import Path

import pytest

from tests.stack.conftest import Server


def old_object(state: Path, key: str, body: bytes, generation: int = 1, **more: object) -> Path:
    """Write an object as the older store did: bytes, JSON, its length and CRC-32, a mark."""
    record = {
        "key": key, "size": len(body), "etag": hashlib.md5(body).hexdigest(), "modified": 1.7e9,
        "metadata": {"content-type": "text/x", "x-amz-meta-k": "v"}, "storage": "STANDARD", "checksum_algorithm": None,
        "checksum_value": None, "upload": None,
    }  # fmt: skip
    text = json.dumps(record | more).encode()
    name = hashlib.sha256(key.encode()).hexdigest()
    path = state / "objects" / "buckets" / "dropforge" / name[:2] / f"{name}.{generation}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body + text + struct.pack("<II8s", len(text), zlib.crc32(text), b"DFOBJ\x00\x00\x01"))
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of an older store."""
    old_object(tmp_path, "small", b"old", generation=1)
    old_object(tmp_path, "small", b"new", generation=2)
    old_object(tmp_path, "large", b"x" * 100_000, etag="of-parts-2")
    queue = tmp_path / "queues" / "dropforge-drops"
    queue.mkdir(parents=True)
    message = {
        "id": "m1", "body": "hello", "sent": time.time() * 1000, "delayed_until": 0,
        "attributes": {"raw": {"DataType": "Binary", "BinaryValue": {"$bytes": "AP8="}}}, "system_attributes": {},
    }  # fmt: skip
    (queue / "m1.json").write_text(json.dumps(message))
    return tmp_path


def check(server: Server) -> None:
    client = server.client()
    small = client.get_object(Bucket="dropforge", Key="small")
    assert (small["Body"].read(), small["Metadata"], small["ContentType"]) == (b"new", {"k": "v"}, "text/x")
    assert small["LastModified"].timestamp() == 1.7e9
    large = client.get_object(Bucket="dropforge", Key="large")
    assert (large["Body"].read(), large["ETag"]) == (b"x" * 100_000, '"of-parts-2"')
    sqs = server.client("sqs")
    answer = sqs.receive_message(
        QueueUrl=server.queue_url, VisibilityTimeout=0, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
    )
    assert [(message["MessageId"], message["Body"]) for message in answer["Messages"]] == [("m1", "hello")]
    assert not (server.state / "queues").exists()
    assert not (server.state / "objects" / "buckets").exists()


def test_objects_and_messages_are_taken_over_once(state: Path) -> None:
    server = Server(state).start()
    try:
        check(server)
        check(server.restart())
    finally:
        server.kill()


def test_a_broken_file_is_put_aside_and_told(state: Path) -> None:
    path = old_object(state, "broken", b"whole once")
    path.write_bytes(path.read_bytes()[:-3])
    message = state / "queues" / "dropforge-drops" / "m0.json"
    message.write_text('{"id": "m0", "bo')
    server = Server(state).start()
    try:
        check(server)
        assert all((state / "objects" / "broken" / file.name).is_file() for file in (path, message))
        assert "broken" in (state / "objects.log").read_text()
    finally:
        server.kill()


def test_a_kill_while_taking_over_begins_it_anew(state: Path) -> None:
    copies = {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and path.name != "secrets.json"}
    server = Server(state).start()
    server.kill()
    # As a kill before the old folders were renamed would leave it: what was taken over, and the old files.
    for path, data in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    server.start()
    try:
        check(server)
        assert len(list((state / "objects" / "bodies").iterdir())) == 1
    finally:
        server.kill()
