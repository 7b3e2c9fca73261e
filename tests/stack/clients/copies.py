"""Copying objects within the server."""

from __future__ import annotations

import datetime
from typing import Any

from tests.stack.clients.place import Place, refused


def _copy(at: Place, source: str = "a", target: str = "b", **more: Any) -> dict[str, Any]:
    more.setdefault("CopySource", {"Bucket": at.bucket, "Key": source})
    return dict(at.s3.copy_object(Bucket=at.bucket, Key=target, **more))


def within_a_bucket(at: Place) -> None:
    put = at.put("a", body=b"body", Metadata={"n": "1"}, ContentType="text/plain")
    assert _copy(at)["CopyObjectResult"]["ETag"] == put["ETag"]
    assert at.get("b") == b"body"
    assert (at.head("b")["Metadata"], at.head("b")["ContentType"]) == ({"n": "1"}, "text/plain")


def to_another_bucket(at: Place) -> None:
    at.put("a", body=b"body")
    other = at.new_bucket()
    at.s3.copy_object(Bucket=other, Key="b", CopySource=f"{at.bucket}/a")
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    assert at.s3.get_object(Bucket=other, Key="b")["Body"].read() == b"body"


def with_other_metadata(at: Place) -> None:
    at.put("a", Metadata={"n": "1"}, ContentType="text/plain")
    _copy(at, MetadataDirective="REPLACE", Metadata={"m": "2"}, ContentType="text/csv")
    assert (at.head("b")["Metadata"], at.head("b")["ContentType"]) == ({"m": "2"}, "text/csv")


def onto_itself_with_other_metadata(at: Place) -> None:
    at.put("a", body=b"body", Metadata={"n": "1"})
    _copy(at, target="a", MetadataDirective="REPLACE", Metadata={"m": "2"})
    assert (at.head("a")["Metadata"], at.get("a")) == ({"m": "2"}, b"body")


def onto_itself_for_nothing(at: Place) -> None:
    at.put("a")
    with refused("InvalidRequest"):
        _copy(at, target="a")


def of_what_is_not_there(at: Place) -> None:
    with refused("NoSuchKey"):
        _copy(at)
    with refused("NoSuchBucket"):
        _copy(at, CopySource=f"{at.bucket}-none/a")


def if_the_source_is_the_one(at: Place) -> None:
    etag = at.put("a")["ETag"]
    _copy(at, CopySourceIfMatch=etag)
    assert at.get("b") == b"x"
    with refused("PreconditionFailed"):
        _copy(at, target="c", CopySourceIfMatch='"0123"')
    assert at.keys() == ["a", "b"]


def if_the_source_is_another(at: Place) -> None:
    etag = at.put("a")["ETag"]
    _copy(at, CopySourceIfNoneMatch='"0123"')
    with refused("PreconditionFailed"):
        _copy(at, target="c", CopySourceIfNoneMatch=etag)


def if_the_source_was_not_changed(at: Place) -> None:
    at.put("a")
    changed = at.head("a")["LastModified"]
    day = datetime.timedelta(days=1)
    _copy(at, CopySourceIfUnmodifiedSince=changed + day)
    with refused("PreconditionFailed"):
        _copy(at, target="c", CopySourceIfUnmodifiedSince=changed - day)


def if_the_source_was_changed(at: Place) -> None:
    at.put("a")
    _copy(at, CopySourceIfModifiedSince=at.head("a")["LastModified"] - datetime.timedelta(days=1))
    assert at.get("b") == b"x"


def onto_what_is_not_there_yet(at: Place) -> None:
    at.put("a", "b")
    with refused("PreconditionFailed"):
        _copy(at, IfNoneMatch="*")
    _copy(at, target="c", IfNoneMatch="*")
    assert at.get("c") == b"x"


def with_its_tags(at: Place) -> None:
    at.put("a", Tagging="n=1")
    _copy(at)
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="b")["TagSet"] == [{"Key": "n", "Value": "1"}]


def with_other_tags(at: Place) -> None:
    at.put("a", Tagging="n=1")
    _copy(at, TaggingDirective="REPLACE", Tagging="m=2")
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="b")["TagSet"] == [{"Key": "m", "Value": "2"}]


def into_another_storage_class(at: Place) -> None:
    at.put("a", body=b"body")
    _copy(at, target="a", StorageClass="STANDARD_IA")
    assert (at.head("a")["StorageClass"], at.get("a")) == ("STANDARD_IA", b"body")
