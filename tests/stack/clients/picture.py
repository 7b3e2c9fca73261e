"""All that can be read of a server, as plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

# By name of the method that reads it.
OF_A_BUCKET = (
    "get_bucket_accelerate_configuration",
    "get_bucket_acl",
    "get_bucket_cors",
    "get_bucket_encryption",
    "get_bucket_lifecycle_configuration",
    "get_bucket_location",
    "get_bucket_logging",
    "get_bucket_notification_configuration",
    "get_bucket_ownership_controls",
    "get_bucket_policy",
    "get_bucket_replication",
    "get_bucket_tagging",
    "get_bucket_versioning",
    "get_bucket_website",
    "get_object_lock_configuration",
    "get_public_access_block",
)
OF_A_VERSION = ("get_object_acl", "get_object_tagging", "get_object_legal_hold")
# What a queue says of itself that time alone changes.
PASSING = {"ApproximateNumberOfMessagesDelayed"}


def picture(s3: Any, sqs: Any) -> dict[str, Any]:
    """Read buckets with all versions, settings and open uploads, and queues with how many messages they have."""
    buckets = {one["Name"]: one["CreationDate"] for one in s3.list_buckets()["Buckets"]}
    return {
        "buckets": {name: {"created": made, **_bucket(s3, name)} for name, made in sorted(buckets.items())},
        "queues": {url: _queue(sqs, url) for url in sorted(sqs.list_queues().get("QueueUrls", []))},
    }


def _bucket(s3: Any, bucket: str) -> dict[str, Any]:
    versions, markers = [], []
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket):
        versions += page.get("Versions", [])
        markers += page.get("DeleteMarkers", [])
    uploads = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return {
        "settings": {name: _answer(getattr(s3, name), Bucket=bucket) for name in OF_A_BUCKET},
        "versions": [{**one, **_version(s3, bucket, one)} for one in versions],
        "markers": markers,
        "listed": s3.list_objects_v2(Bucket=bucket).get("Contents", []),
        "uploads": [{**one, "parts": _parts(s3, bucket, one)} for one in uploads],
    }


def _version(s3: Any, bucket: str, listed: dict[str, Any]) -> dict[str, Any]:
    named = {"Bucket": bucket, "Key": listed["Key"]}
    if listed["VersionId"] != "null":  # plain moto does not know it by that name everywhere
        named["VersionId"] = listed["VersionId"]
    elif not listed["IsLatest"]:
        return {}
    answer = s3.get_object(**named, ChecksumMode="ENABLED")
    body = answer.pop("Body").read()
    return {
        "body": hashlib.sha256(body).hexdigest(),
        "headers": _plain(answer),
        "settings": {name: _answer(getattr(s3, name), **named) for name in OF_A_VERSION},
    }


def _parts(s3: Any, bucket: str, upload: dict[str, Any]) -> list[dict[str, Any]]:
    answer = s3.list_parts(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    return list(answer.get("Parts", []))


def _queue(sqs: Any, url: str) -> dict[str, Any]:
    attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return {
        "attributes": {name: value for name, value in attributes.items() if name not in PASSING},
        "tags": sqs.list_queue_tags(QueueUrl=url).get("Tags", {}),
    }


def _answer(ask: Callable[..., dict[str, Any]], **named: str) -> Any:
    """What it answers, or the code of the error: that something is not set is a part of the picture too."""
    try:
        return _plain(ask(**named))
    except ClientError as error:
        return error.response["Error"]["Code"]


def _plain(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}
