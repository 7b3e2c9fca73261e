"""What a kill leaves of everything that a client can write: all of it."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack.clients import multipart, place
from tests.stack.clients.picture import picture
from tests.stack.conftest import Server

READERS = "http://acs.amazonaws.com/groups/global/AllUsers"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("survives") / "state").start()
    yield found
    found.kill()


@pytest.fixture
def at(own_server: Server, tmp_path: Path) -> place.Place:
    """A place on our server with a new bucket."""
    target = place.Target("ours", own_server.url, own_server.access_key, own_server.secret_key)
    found = place.Place(target, place.new_name(), tmp_path)
    found.s3.create_bucket(Bucket=found.bucket)
    return found


def _see(at: place.Place) -> dict[str, Any]:
    return dict(picture(at.s3, at.sqs))


def _same_after_a_kill(at: place.Place, server: Server) -> None:
    """Kill the server twice: what was read back from the disk must be kept there too."""
    before = _see(at)
    for _ in range(2):
        server.restart()
        assert _see(at) == before


def write_objects(at: place.Place) -> None:
    at.put("plain", "a/../b", "//", "ü+1 %", body=b"body")
    at.put(
        "told",
        body=b"told",
        ContentType="text/csv",
        CacheControl="max-age=1",
        ContentDisposition="inline",
        Metadata={"n": "1", "m": "x y"},
        StorageClass="STANDARD_IA",
        ChecksumAlgorithm="SHA256",
        Tagging="a=1&b=2",
    )
    at.put("read", ACL="public-read")
    at.put("tagged", "untagged")
    tags = {"TagSet": [{"Key": "k", "Value": "v"}]}
    for key in ("tagged", "untagged"):
        at.s3.put_object_tagging(Bucket=at.bucket, Key=key, Tagging=tags)
    at.s3.delete_object_tagging(Bucket=at.bucket, Key="untagged")
    at.put("acl")
    at.s3.put_object_acl(Bucket=at.bucket, Key="acl", ACL="public-read")
    at.s3.copy_object(
        Bucket=at.bucket, Key="copy", CopySource=f"{at.bucket}/told", MetadataDirective="REPLACE", Metadata={"c": "1"}
    )
    multipart.whole(at, Metadata={"parts": "2"}, Tagging="p=1")
    at.put("gone", "gone too", "replaced", body=b"old")
    at.put("replaced", body=b"new")
    at.s3.delete_object(Bucket=at.bucket, Key="gone")
    at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": [{"Key": "gone too"}, {"Key": "never"}]})


def write_versions(at: place.Place) -> None:
    at.put("before", body=b"null")
    at.keep_versions()
    at.put("before", body=b"1")
    first = at.put("a", body=b"1", Tagging="n=1", Metadata={"n": "1"})["VersionId"]
    dropped = at.put("a", body=b"2")["VersionId"]
    at.put("a", body=b"3")
    at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=dropped)
    at.put("marked", "unmarked")
    at.s3.delete_object(Bucket=at.bucket, Key="marked")
    marker = at.s3.delete_object(Bucket=at.bucket, Key="unmarked")["VersionId"]
    at.s3.delete_object(Bucket=at.bucket, Key="unmarked", VersionId=marker)
    at.s3.copy_object(Bucket=at.bucket, Key="a", CopySource={"Bucket": at.bucket, "Key": "a", "VersionId": first})
    at.s3.put_object_tagging(
        Bucket=at.bucket, Key="a", VersionId=first, Tagging={"TagSet": [{"Key": "n", "Value": "9"}]}
    )
    multipart.whole(at, "a")


def write_suspended_versions(at: place.Place) -> None:
    write_versions(at)
    at.keep_versions("Suspended")
    at.put("later")


def write_settings(at: place.Place) -> None:
    bucket = {"Bucket": at.bucket}
    at.new_bucket(CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    at.s3.put_bucket_tagging(**bucket, Tagging={"TagSet": [{"Key": "k", "Value": "v"}]})
    at.s3.put_bucket_acl(**bucket, ACL="public-read")
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{at.bucket}/x",
    }
    at.s3.put_bucket_policy(**bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    rule = {"AllowedMethods": ["GET"], "AllowedOrigins": ["https://example.com"], "MaxAgeSeconds": 60}
    at.s3.put_bucket_cors(**bucket, CORSConfiguration={"CORSRules": [rule]})
    rules = [{"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 3}}]
    at.s3.put_bucket_lifecycle_configuration(**bucket, LifecycleConfiguration={"Rules": rules})
    by_default = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    at.s3.put_bucket_encryption(**bucket, ServerSideEncryptionConfiguration={"Rules": [by_default]})
    at.s3.put_bucket_website(**bucket, WebsiteConfiguration={"IndexDocument": {"Suffix": "index.html"}})
    at.s3.put_bucket_ownership_controls(
        **bucket, OwnershipControls={"Rules": [{"ObjectOwnership": "BucketOwnerPreferred"}]}
    )
    blocked = {
        "BlockPublicAcls": True,
        "IgnorePublicAcls": True,
        "BlockPublicPolicy": True,
        "RestrictPublicBuckets": True,
    }
    at.s3.put_public_access_block(**bucket, PublicAccessBlockConfiguration=blocked)
    at.s3.put_bucket_accelerate_configuration(**bucket, AccelerateConfiguration={"Status": "Enabled"})
    # And what is deleted again stays away.
    other = {"Bucket": at.new_bucket()}
    at.s3.put_bucket_cors(**other, CORSConfiguration={"CORSRules": [rule]})
    at.s3.delete_bucket_cors(**other)
    at.s3.delete_bucket(Bucket=at.new_bucket())


def write_locks(at: place.Place) -> None:
    bucket = at.new_bucket(ObjectLockEnabledForBucket=True)
    retention = {"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 2}}}
    at.s3.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", **retention}
    )
    for key in ("by default", "retained", "held"):
        at.s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)
    at.s3.put_object_retention(
        Bucket=bucket, Key="retained", Retention={"Mode": "COMPLIANCE", "RetainUntilDate": until}
    )
    at.s3.put_object_legal_hold(Bucket=bucket, Key="held", LegalHold={"Status": "ON"})


def write_queues(at: place.Place) -> None:
    dead = at.new_queue()
    arn = at.sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 3})
    queue = at.new_queue(RedrivePolicy=policy, VisibilityTimeout="600", MaximumMessageSize="2048")
    at.sqs.tag_queue(QueueUrl=queue, Tags={"k": "v"})
    at.sqs.add_permission(QueueUrl=queue, Label="l", AWSAccountIds=["123456789012"], Actions=["SendMessage"])
    at.sqs.set_queue_attributes(QueueUrl=dead, Attributes={"VisibilityTimeout": "77"})
    attribute = {"n": {"DataType": "String", "StringValue": "1"}}
    for body in ("one", "two", "three"):
        at.sqs.send_message(QueueUrl=queue, MessageBody=body, MessageAttributes=attribute)
    (message,) = at.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=1)["Messages"]
    at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    fifo = at.new_queue(".fifo", FifoQueue="true", ContentBasedDeduplication="true")
    at.sqs.send_message(QueueUrl=fifo, MessageBody="f", MessageGroupId="g")
    at.sqs.delete_queue(QueueUrl=at.new_queue())


@pytest.mark.parametrize(
    "write", [write_objects, write_versions, write_suspended_versions, write_settings, write_locks, write_queues]
)
def test_what_was_written_is_there_after_a_kill(at: place.Place, own_server: Server, write: Any) -> None:
    write(at)
    _same_after_a_kill(at, own_server)


def test_an_open_upload_is_completed_after_a_kill(at: place.Place, own_server: Server) -> None:
    upload = multipart.begin(at, Metadata={"n": "1"}, ContentType="text/plain", Tagging="t=1")
    parts = [multipart.send(at, upload, 1, b"a" * multipart.LEAST)]
    aborted = multipart.begin(at, "aborted")
    at.s3.abort_multipart_upload(Bucket=at.bucket, Key="aborted", UploadId=aborted)
    _same_after_a_kill(at, own_server)
    parts.append(multipart.send(at, upload, 2, b"tail"))
    answer = multipart.finish(at, upload, parts)
    _same_after_a_kill(at, own_server)
    assert at.get("big") == b"a" * multipart.LEAST + b"tail"
    head = at.head("big")
    assert (head["ETag"], head["Metadata"], head["ContentType"]) == (answer["ETag"], {"n": "1"}, "text/plain")
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="big")["TagSet"] == [{"Key": "t", "Value": "1"}]


def test_a_notification_is_sent_after_a_kill(at: place.Place, own_server: Server) -> None:
    queue = at.new_queue()
    arn = at.sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    rules = [{"Name": "prefix", "Value": "in/"}]
    rule = {"Id": "r", "QueueArn": arn, "Events": ["s3:ObjectCreated:*"], "Filter": {"Key": {"FilterRules": rules}}}
    at.s3.put_bucket_notification_configuration(
        Bucket=at.bucket, NotificationConfiguration={"QueueConfigurations": [rule]}
    )
    at.put("in/before", "out")
    _same_after_a_kill(at, own_server)
    at.put("in/after", "out")
    found = _bodies(at, queue)
    keys = [record["s3"]["object"]["key"] for body in found for record in json.loads(body).get("Records", [])]
    assert sorted(key.replace("%2F", "/") for key in keys) == ["in/after", "in/before"]


def test_messages_are_received_after_a_kill(at: place.Place, own_server: Server) -> None:
    queue = at.new_queue(VisibilityTimeout="600")
    told = {"n": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    at.sqs.send_message(QueueUrl=queue, MessageBody="gone")
    (gone,) = at.sqs.receive_message(QueueUrl=queue)["Messages"]
    at.sqs.send_message(QueueUrl=queue, MessageBody="kept ü <&>", MessageAttributes=told)
    at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=gone["ReceiptHandle"])
    own_server.restart()
    (message,) = at.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, MessageAttributeNames=["All"])[
        "Messages"
    ]
    assert (message["Body"], message["MessageAttributes"]) == ("kept ü <&>", told)
    at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    own_server.restart()
    assert _bodies(at, queue) == []


def test_a_lock_still_forbids_after_a_kill(at: place.Place, own_server: Server) -> None:
    bucket = at.new_bucket(ObjectLockEnabledForBucket=True)
    version = at.s3.put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    at.s3.put_object_legal_hold(Bucket=bucket, Key="a", LegalHold={"Status": "ON"})
    own_server.restart()
    with place.refused("AccessDenied"):
        at.s3.delete_object(Bucket=bucket, Key="a", VersionId=version)


def test_a_log_of_requests_goes_on_after_a_kill(at: place.Place, own_server: Server) -> None:
    logs = at.new_bucket(ACL="log-delivery-write")
    told = {"LoggingEnabled": {"TargetBucket": logs, "TargetPrefix": "of/"}}
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus=told)
    at.put("a")
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus={})
    _same_after_a_kill(at, own_server)
    before = at.keys(logs)
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus=told)
    own_server.restart()
    at.put("a")
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus={})  # or other tests would be logged too
    assert set(before) < set(at.keys(logs))


def _bodies(at: place.Place, queue: str) -> list[str]:
    """All messages that come, and none twice."""
    found: list[str] = []
    deadline = time.monotonic() + 30
    while messages := at.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", []):
        assert time.monotonic() < deadline
        for message in messages:
            found.append(message["Body"])
            at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    return found
