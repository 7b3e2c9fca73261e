"""Requests that hold only if the object is as they say."""

from __future__ import annotations

import datetime

from tests.stack.clients.place import Place, refused

DAY = datetime.timedelta(days=1)
OTHER = '"00000000000000000000000000000000"'


def read_if_it_matches(at: Place) -> None:
    etag = at.put("a")["ETag"]
    assert at.get("a", IfMatch=etag) == b"x"
    with refused("PreconditionFailed"):
        at.get("a", IfMatch=OTHER)
    assert at.head("a", IfMatch=etag)["ETag"] == etag
    with refused("412"):
        at.head("a", IfMatch=OTHER)


def read_if_it_matches_not(at: Place) -> None:
    etag = at.put("a")["ETag"]
    assert at.get("a", IfNoneMatch=OTHER) == b"x"
    with refused("304"):
        at.get("a", IfNoneMatch=etag)
    with refused("304"):
        at.head("a", IfNoneMatch=etag)


def read_if_it_was_changed(at: Place) -> None:
    at.put("a")
    changed = at.head("a")["LastModified"]
    assert at.get("a", IfModifiedSince=changed - DAY) == b"x"
    with refused("304"):
        at.get("a", IfModifiedSince=changed)
    with refused("304"):
        at.head("a", IfModifiedSince=changed)


def read_if_it_was_not_changed(at: Place) -> None:
    at.put("a")
    changed = at.head("a")["LastModified"]
    assert at.get("a", IfUnmodifiedSince=changed) == b"x"
    with refused("PreconditionFailed"):
        at.get("a", IfUnmodifiedSince=changed - DAY)
    with refused("412"):
        at.head("a", IfUnmodifiedSince=changed - DAY)


def write_if_nothing_is_there(at: Place) -> None:
    at.put("a", body=b"first", IfNoneMatch="*")
    with refused("PreconditionFailed"):
        at.put("a", body=b"second", IfNoneMatch="*")
    assert at.get("a") == b"first"
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    at.put("a", body=b"third", IfNoneMatch="*")
    assert at.get("a") == b"third"


def write_if_it_matches(at: Place) -> None:
    etag = at.put("a", body=b"first")["ETag"]
    at.put("a", body=b"second", IfMatch=etag)
    with refused("PreconditionFailed"):
        at.put("a", body=b"third", IfMatch=etag)
    assert at.get("a") == b"second"


def write_if_a_missing_one_matches(at: Place) -> None:
    with refused("NoSuchKey"):
        at.put("a", IfMatch=OTHER)
    assert at.keys() == []


def write_where_a_delete_marker_is(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    at.put("a", body=b"anew", IfNoneMatch="*")
    assert at.get("a") == b"anew"


def delete_if_it_matches(at: Place) -> None:
    etag = at.put("a")["ETag"]
    with refused("PreconditionFailed"):
        at.s3.delete_object(Bucket=at.bucket, Key="a", IfMatch=OTHER)
    at.s3.delete_object(Bucket=at.bucket, Key="a", IfMatch=etag)
    assert at.keys() == []
