"""Versions of objects: kept, listed, deleted and brought back."""

from __future__ import annotations

from typing import Any

from tests.stack.clients.place import Place, refused


def _listed(at: Place, **more: Any) -> list[tuple[str, str]]:
    answer = at.s3.list_object_versions(Bucket=at.bucket, **more)
    return [(item["Key"], item["VersionId"]) for item in answer.get("Versions", [])]


def a_bucket_keeps_none_by_itself(at: Place) -> None:
    assert "Status" not in at.s3.get_bucket_versioning(Bucket=at.bucket)
    assert "VersionId" not in at.put("a")
    at.keep_versions()
    assert at.s3.get_bucket_versioning(Bucket=at.bucket)["Status"] == "Enabled"
    at.keep_versions("Suspended")
    assert at.s3.get_bucket_versioning(Bucket=at.bucket)["Status"] == "Suspended"


def each_write_is_a_version(at: Place) -> None:
    at.keep_versions()
    first, second = at.put("a", body=b"1")["VersionId"], at.put("a", body=b"22")["VersionId"]
    assert first != second
    assert at.get("a") == b"22"
    assert at.get("a", VersionId=first) == b"1"
    assert at.head("a", VersionId=first)["ContentLength"] == 1
    assert at.head("a")["VersionId"] == second


def the_newest_version_is_listed_first(at: Place) -> None:
    at.keep_versions()
    made = [at.put("a", body=bytes(size))["VersionId"] for size in (1, 2, 3)]
    answer = at.s3.list_object_versions(Bucket=at.bucket)
    assert [item["VersionId"] for item in answer["Versions"]] == made[::-1]
    assert [item["IsLatest"] for item in answer["Versions"]] == [True, False, False]
    assert [item["Size"] for item in answer["Versions"]] == [3, 2, 1]


def versions_of_a_prefix_and_delimiter(at: Place) -> None:
    at.keep_versions()
    at.put("a/1", "a/2", "b", "a/1")
    answer = at.s3.list_object_versions(Bucket=at.bucket, Delimiter="/")
    assert [item["Prefix"] for item in answer["CommonPrefixes"]] == ["a/"]
    assert [item["Key"] for item in answer["Versions"]] == ["b"]
    assert [key for key, _ in _listed(at, Prefix="a/")] == ["a/1", "a/1", "a/2"]


def versions_come_in_pages(at: Place) -> None:
    at.keep_versions()
    at.put("a", "a", "a", "b", "c", "c")
    at.s3.delete_object(Bucket=at.bucket, Key="b")
    pages = at.s3.get_paginator("list_object_versions").paginate(Bucket=at.bucket, PaginationConfig={"PageSize": 2})
    found = [(item["Key"], item["VersionId"]) for page in pages for item in page.get("Versions", [])]
    assert found == _listed(at)
    assert len(set(found)) == 6


def the_versions_after_a_key(at: Place) -> None:
    at.keep_versions()
    at.put("a", "a", "b", "c")
    answer = at.s3.list_object_versions(Bucket=at.bucket, MaxKeys=2)
    assert answer["IsTruncated"]
    assert [key for key, _ in _listed(at, KeyMarker="b")] == ["c"]


def a_delete_leaves_a_marker(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    answer = at.s3.delete_object(Bucket=at.bucket, Key="a")
    assert answer["DeleteMarker"]
    with refused("NoSuchKey"):
        at.get("a")
    with refused("404"):
        at.head("a")
    assert at.keys() == []
    marker = at.s3.list_object_versions(Bucket=at.bucket)["DeleteMarkers"][0]
    assert (marker["VersionId"], marker["IsLatest"], marker["Key"]) == (answer["VersionId"], True, "a")


def deleting_the_marker_brings_it_back(at: Place) -> None:
    at.keep_versions()
    at.put("a", body=b"kept")
    marker = at.s3.delete_object(Bucket=at.bucket, Key="a")["VersionId"]
    assert at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=marker)["VersionId"] == marker
    assert at.get("a") == b"kept"
    assert "DeleteMarkers" not in at.s3.list_object_versions(Bucket=at.bucket)


def deleting_a_marker_says_so(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    marker = at.s3.delete_object(Bucket=at.bucket, Key="a")["VersionId"]
    assert at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=marker)["DeleteMarker"]


def a_marker_cannot_be_read(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    marker = at.s3.delete_object(Bucket=at.bucket, Key="a")["VersionId"]
    with refused("MethodNotAllowed"):
        at.get("a", VersionId=marker)


def a_missing_key_gets_a_marker_too(at: Place) -> None:
    at.keep_versions()
    at.s3.delete_object(Bucket=at.bucket, Key="never-there")
    assert [item["Key"] for item in at.s3.list_object_versions(Bucket=at.bucket)["DeleteMarkers"]] == ["never-there"]


def deleting_one_version(at: Place) -> None:
    at.keep_versions()
    first, second, third = (at.put("a", body=body)["VersionId"] for body in (b"1", b"2", b"3"))
    assert at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=second)["VersionId"] == second
    assert _listed(at) == [("a", third), ("a", first)]
    at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=third)
    assert at.get("a") == b"1"


def a_version_that_is_not_there(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    with refused("NoSuchVersion"):
        at.get("a", VersionId="0b1c2d3e-0000-4000-8000-000000000000")


def what_was_before_is_the_null_version(at: Place) -> None:
    at.put("a", body=b"before")
    at.keep_versions()
    newer = at.put("a", body=b"after")["VersionId"]
    assert _listed(at) == [("a", newer), ("a", "null")]
    assert at.get("a", VersionId="null") == b"before"
    at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId="null")
    assert _listed(at) == [("a", newer)]


def a_suspended_bucket_replaces_its_null_version(at: Place) -> None:
    at.keep_versions()
    kept = at.put("a", body=b"kept")["VersionId"]
    at.keep_versions("Suspended")
    at.put("a", body=b"null 1")
    at.put("a", body=b"null 2")
    assert at.get("a") == b"null 2"
    assert _listed(at) == [("a", "null"), ("a", kept)]
    assert at.get("a", VersionId=kept) == b"kept"


def a_suspended_bucket_still_has_its_versions(at: Place) -> None:
    at.keep_versions()
    first, second = at.put("a", body=b"1")["VersionId"], at.put("a", body=b"2")["VersionId"]
    at.keep_versions("Suspended")
    assert _listed(at) == [("a", second), ("a", first)]
    assert at.get("a", VersionId=first) == b"1"
    assert at.put("b").get("VersionId", "null") == "null"


def a_suspended_bucket_keeps_its_versions_when_one_deletes(at: Place) -> None:
    at.keep_versions()
    kept = at.put("a", body=b"kept")["VersionId"]
    at.keep_versions("Suspended")
    assert at.s3.delete_object(Bucket=at.bucket, Key="a")["DeleteMarker"]
    with refused("NoSuchKey"):
        at.get("a")
    assert at.get("a", VersionId=kept) == b"kept"


def a_copy_restores_an_old_version(at: Place) -> None:
    at.keep_versions()
    old = at.put("a", body=b"old", Metadata={"n": "1"})["VersionId"]
    at.put("a", body=b"new")
    answer = at.s3.copy_object(
        Bucket=at.bucket, Key="a", CopySource={"Bucket": at.bucket, "Key": "a", "VersionId": old}
    )
    assert answer["VersionId"] != old
    assert (at.get("a"), at.head("a")["Metadata"]) == (b"old", {"n": "1"})
    assert len(_listed(at)) == 3


def a_copy_tells_the_version_it_took(at: Place) -> None:
    at.keep_versions()
    old = at.put("a", body=b"old")["VersionId"]
    answer = at.s3.copy_object(Bucket=at.bucket, Key="b", CopySource={"Bucket": at.bucket, "Key": "a"})
    assert answer["CopySourceVersionId"] == old


def many_versions_are_deleted_at_once(at: Place) -> None:
    at.keep_versions()
    first, second = at.put("a", body=b"1")["VersionId"], at.put("a", body=b"2")["VersionId"]
    at.put("b")
    wanted = [{"Key": "a", "VersionId": second}, {"Key": "b"}]
    answer = at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": wanted})
    assert {item["Key"]: item.get("VersionId") for item in answer["Deleted"]} == {"a": second, "b": None}
    assert at.get("a") == b"1"
    assert at.keys() == ["a"]
    assert ("a", first) in _listed(at)
    assert len(_listed(at, Prefix="b")) == 1


def deleting_many_tells_of_markers(at: Place) -> None:
    at.keep_versions()
    at.put("a")
    (found,) = at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": [{"Key": "a"}]})["Deleted"]
    assert found["DeleteMarker"]
    assert found["DeleteMarkerVersionId"]


def a_version_has_tags_of_its_own(at: Place) -> None:
    at.keep_versions()
    first, second = at.put("a", Tagging="n=1")["VersionId"], at.put("a", Tagging="n=2")["VersionId"]
    for version, value in ((first, "1"), (second, "2")):
        answer = at.s3.get_object_tagging(Bucket=at.bucket, Key="a", VersionId=version)
        assert answer["TagSet"] == [{"Key": "n", "Value": value}]
    at.s3.put_object_tagging(
        Bucket=at.bucket, Key="a", VersionId=first, Tagging={"TagSet": [{"Key": "n", "Value": "9"}]}
    )
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="a")["TagSet"] == [{"Key": "n", "Value": "2"}]
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="a", VersionId=first)["TagSet"][0]["Value"] == "9"


def a_multipart_upload_is_a_version(at: Place) -> None:
    at.keep_versions()
    first = at.put("a", body=b"first")["VersionId"]
    upload = at.s3.create_multipart_upload(Bucket=at.bucket, Key="a")["UploadId"]
    part = at.s3.upload_part(Bucket=at.bucket, Key="a", UploadId=upload, PartNumber=1, Body=b"second")
    answer = at.s3.complete_multipart_upload(
        Bucket=at.bucket,
        Key="a",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    )
    assert _listed(at) == [("a", answer["VersionId"]), ("a", first)]
    assert (at.get("a"), at.get("a", VersionId=first)) == (b"second", b"first")


def a_bucket_with_old_versions_is_not_empty(at: Place) -> None:
    at.keep_versions()
    version = at.put("a")["VersionId"]
    marker = at.s3.delete_object(Bucket=at.bucket, Key="a")["VersionId"]
    with refused("BucketNotEmpty"):
        at.s3.delete_bucket(Bucket=at.bucket)
    for one in (version, marker):
        at.s3.delete_object(Bucket=at.bucket, Key="a", VersionId=one)
    at.s3.delete_bucket(Bucket=at.bucket)
