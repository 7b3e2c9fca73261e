"""Conditional writes have exactly one winner, however many processes ask at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from botocore.exceptions import ClientError

from tests.stack.conftest import Server

BUCKET = "dropforge"
RACERS = 3
ROUNDS = 12

RACER = """
import json, os, sys
from dropforge.store import S3Store
me, rounds = int(sys.argv[1]), int(sys.argv[2])
store = S3Store("dropforge")
store.stat("warm")
won = []
print("ready", flush=True)
sys.stdin.readline()
for number in range(rounds):
    if store.put_if_absent(f"claim/{number}", str(me).encode()):
        won.append(number)
counted = 0
while counted < rounds:
    info = store.stat("counter")
    value = int(store.get("counter"))
    fresh = store.stat("counter")
    if fresh.etag == info.etag and store.put_if_match("counter", str(value + 1).encode(), info.etag):
        counted += 1
print(json.dumps(won))
"""


def test_one_winner_per_key_and_no_lost_update(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="counter", Body=b"0")
    env = {
        "PATH": "/usr/bin:/bin",
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(number), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for number in range(RACERS)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(number for one in won for number in one) == list(range(ROUNDS))
    for racer, numbers in enumerate(won):
        for number in numbers:
            assert client.get_object(Bucket=BUCKET, Key=f"claim/{number}")["Body"].read() == str(racer).encode()
    assert client.get_object(Bucket=BUCKET, Key="counter")["Body"].read() == str(RACERS * ROUNDS).encode()


def test_conditions_hold_for_copies_and_uploads_in_parts_too(server: Server) -> None:
    client = server.client()
    source = {"Bucket": BUCKET, "Key": "a"}
    tag = client.put_object(Bucket=BUCKET, Key="a", Body=b"1")["ETag"]
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="a")["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key="a", UploadId=upload, PartNumber=1, Body=b"2")
    complete = {
        "Bucket": BUCKET,
        "Key": "a",
        "UploadId": upload,
        "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    }
    for call in (
        lambda: client.put_object(Bucket=BUCKET, Key="a", Body=b"", IfNoneMatch="*"),
        lambda: client.put_object(Bucket=BUCKET, Key="a", Body=b"", IfMatch='"wrong"'),
        lambda: client.complete_multipart_upload(**complete, IfNoneMatch="*"),
        lambda: client.complete_multipart_upload(**complete, IfMatch='"wrong"'),
        lambda: client.copy_object(Bucket=BUCKET, Key="a", CopySource=source, IfNoneMatch="*"),
        lambda: client.delete_object(Bucket=BUCKET, Key="a", IfMatch='"wrong"'),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"1"
    client.complete_multipart_upload(**complete, IfMatch=tag)
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"2"
