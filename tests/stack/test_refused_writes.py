"""What the store refuses changes nothing: neither what is seen now nor what is there after a restart."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.stack.conftest import Server

BUCKET = "dropforge"
BAD_TAG = "aws:reserved=1"


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as error:
        call()
    return str(error.value.response["Error"]["Code"])


def test_a_write_that_moto_refuses_after_it_began_leaves_the_old_object(server: Server) -> None:
    client = server.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="c", Tagging=BAD_TAG)["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key="c", UploadId=upload, PartNumber=1, Body=b"new")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    for key in ("a", "b", "c"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"old", Tagging="kept=1")
    tagged = {"TaggingDirective": "REPLACE", "Tagging": BAD_TAG}
    assert refused(lambda: client.put_object(Bucket=BUCKET, Key="a", Body=b"new", Tagging=BAD_TAG)) == "InvalidTag"
    assert refused(lambda: client.copy_object(Bucket=BUCKET, Key="b", CopySource=f"{BUCKET}/a", **tagged))
    of_upload = {"Bucket": BUCKET, "Key": "c", "UploadId": upload}
    assert refused(lambda: client.complete_multipart_upload(**of_upload, MultipartUpload=parts))
    for _ in range(2):
        for key in ("a", "b", "c"):
            assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"old"
            assert client.get_object_tagging(Bucket=BUCKET, Key=key)["TagSet"] == [{"Key": "kept", "Value": "1"}]
        assert len(client.list_parts(**of_upload)["Parts"]) == 1
        client.put_object(Bucket=BUCKET, Key="other", Body=b"")
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "other"}]})  # which saves the whole bucket
        client = server.restart().client()
    client.abort_multipart_upload(**of_upload)


def test_a_refused_success_tells_nobody(server: Server) -> None:
    key = "drops/f/d/_SUCCESS"
    assert refused(lambda: server.client().put_object(Bucket=BUCKET, Key=key, Body=b"", Tagging=BAD_TAG))
    assert "Messages" not in server.client("sqs").receive_message(QueueUrl=server.queue_url)


def test_a_request_that_a_queue_refuses_leaves_others_messages_in_flight(server: Server) -> None:
    queue = server.client("sqs")
    queue.send_message(QueueUrl=server.queue_url, MessageBody="flying")
    received = queue.receive_message(QueueUrl=server.queue_url, VisibilityTimeout=600)["Messages"]
    refused(lambda: queue.set_queue_attributes(QueueUrl=server.queue_url, Attributes={"RedrivePolicy": "no JSON"}))
    refused(lambda: queue.delete_queue(QueueUrl=f"{server.queue_url}"))
    refused(lambda: queue.send_message_batch(QueueUrl=server.queue_url, Entries=[]))
    assert "Messages" not in queue.receive_message(QueueUrl=server.queue_url)
    queue.delete_message(QueueUrl=server.queue_url, ReceiptHandle=received[0]["ReceiptHandle"])
    policy = queue.get_queue_attributes(QueueUrl=server.queue_url, AttributeNames=["RedrivePolicy"])["Attributes"]
    assert json.loads(policy["RedrivePolicy"])["maxReceiveCount"] == 5


def test_an_upload_is_completed_under_its_own_key_alone(server: Server) -> None:
    client = server.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="mine")["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key="mine", UploadId=upload, PartNumber=1, Body=b"x")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    other = {"Bucket": BUCKET, "Key": "other", "UploadId": upload, "MultipartUpload": parts}
    assert refused(lambda: client.complete_multipart_upload(**other)) == "NoSuchUpload"
    client.complete_multipart_upload(**(other | {"Key": "mine"}))
    assert client.get_object(Bucket=BUCKET, Key="mine")["Body"].read() == b"x"


def test_what_moto_would_keep_elsewhere_is_refused(server: Server) -> None:
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    config = Config(retries={"total_max_attempts": 1}, signature_version="s3v4")
    abroad = boto3.client("s3", endpoint_url=server.url, region_name="cn-north-1", config=config, **keys)
    assert refused(lambda: abroad.put_object(Bucket=BUCKET, Key="k", Body=b"")) == "AuthorizationHeaderMalformed"
    assert server.put("/bkt%41", b"")[0] == 400
    client = server.client()
    client.meta.events.register(
        "before-sign.s3", lambda request, **_: request.headers.add_header("x-moto-account-id", "111111111111")
    )
    client.put_object(Bucket=BUCKET, Key="k", Body=b"v")
    assert server.restart().client().get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"v"


def test_the_stacks_own_bucket_stays_whatever_the_query(server: Server) -> None:
    link = server.client().generate_presigned_url("delete_bucket", Params={"Bucket": BUCKET})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(link, method="DELETE"))
    assert error.value.code == 403
    server.client().put_object(Bucket=BUCKET, Key="k", Body=b"")


def post(server: Server, path: str, file: str, fields: dict[str, str]) -> int:
    """Send a browser's form whose file is the last part, as it stands in `file`."""
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}' for name, value in fields.items()]
    body = "".join(f"--B\r\n{part}\r\n" for part in [*parts, file]) + "--B--\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", path, body, {"Content-Type": "multipart/form-data; boundary=B"})
    return connection.getresponse().status


FILE = 'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


def test_a_signed_form_uploads_its_file_and_does_nothing_else(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="victim", Body=b"v")
    form = client.generate_presigned_post(BUCKET, "up/a", Conditions=[["content-length-range", 0, 3]])["fields"]
    assert post(server, f"/{BUCKET}?delete", FILE + "<Delete><Object><Key>victim</Key></Object></Delete>", form) == 400
    assert post(server, f"/{BUCKET}", FILE + "four", form) == 400
    assert post(server, f"/{BUCKET}", FILE.replace('; filename="f"', "") + "four", form) == 400
    assert post(server, f"/{BUCKET}", FILE + "abc", form) == 204
    assert post(server, f"/{BUCKET}", FILE + "abc", {"key": "up/a"}) == 403
    found = {item["Key"]: item["Size"] for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert found == {"up/a": 3, "victim": 1}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("OPTIONS", "/", {}, 403),
        ("POST", f"/{BUCKET}", {"Content-Length": "-1", "Content-Type": "multipart/form-data; boundary=B"}, 400),
        ("POST", f"/{BUCKET}", {"Content-Length": "x"}, 400),
        ("POST", f"/{BUCKET}", {"Content-Length": str(1 << 40), "Content-Type": "multipart/form-data"}, 400),
    ],
)
def test_without_keys_nothing_is_listed_or_read(
    server: Server, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status


def test_a_queue_hears_of_creations_and_tags_as_moto_tells_them(server: Server) -> None:
    client, queue = server.client(), server.client("sqs")
    client.create_bucket(Bucket="told")
    url = queue.create_queue(QueueName="hears")["QueueUrl"]
    told = {
        "QueueArn": "arn:aws:sqs:us-east-1:123456789012:hears",
        "Events": ["s3:ObjectCreated:*", "s3:ObjectTagging:*"],
    }
    client.put_bucket_notification_configuration(
        Bucket="told", NotificationConfiguration={"QueueConfigurations": [told]}
    )
    queue.purge_queue(QueueUrl=url)
    client.put_object(Bucket="told", Key="k", Body=b"")
    messages = queue.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    names = {json.loads(message["Body"])["Records"][0]["eventName"] for message in messages}
    assert names == {"ObjectCreated:Put", "ObjectTagging:Put"}


def starts(state: Path) -> tuple[Server, str]:
    """A server of a folder that it cannot use, and its last words."""
    server = Server(state)
    with pytest.raises(AssertionError):
        server.start()
    return server, (state / "objects.log").read_text()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a store with one large object, which was killed."""
    server = Server(tmp_path).start()
    server.client().put_object(Bucket=BUCKET, Key="k", Body=os.urandom(100_000))
    server.kill()
    return tmp_path


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "a row"])
def test_a_damaged_file_is_told_and_the_bodies_beside_it_stay(kept: Path, damage: str) -> None:
    folder = kept / "objects"
    aside = kept / "aside"
    shutil.copytree(folder, aside)
    if damage == "a row":
        with closing(sqlite3.connect(folder / "objects.db", isolation_level=None)) as database:
            database.execute("UPDATE objects SET state = x'00'")
    else:
        (folder / "objects.db-wal").unlink(missing_ok=True)
        (folder / "objects.db").unlink()
        if damage != "missing":
            (folder / "objects.db").write_bytes(b"garbage" * 1000 if damage == "garbage" else b"")
    server, words = starts(kept)
    assert "Traceback" not in words
    assert "move" in words
    assert len(list((folder / "bodies").iterdir())) == 1
    server.process = None
    shutil.rmtree(folder)
    aside.rename(folder)
    server.start()
    assert len(server.client().get_object(Bucket=BUCKET, Key="k")["Body"].read()) == 100_000
    server.kill()
