"""Uploads in parts."""

from __future__ import annotations

from typing import Any

from tests.stack.clients.place import MIB, Place, refused

LEAST = 5 * MIB  # of every part but the last


def begin(at: Place, key: str = "big", **more: Any) -> str:
    return str(at.s3.create_multipart_upload(Bucket=at.bucket, Key=key, **more)["UploadId"])


def send(at: Place, upload: str, number: int, body: bytes, key: str = "big", **more: Any) -> dict[str, Any]:
    """Upload a part: what its completion has to say of it."""
    answer = at.s3.upload_part(Bucket=at.bucket, Key=key, UploadId=upload, PartNumber=number, Body=body, **more)
    return {"PartNumber": number, "ETag": answer["ETag"]}


def finish(at: Place, upload: str, parts: list[dict[str, Any]], key: str = "big", **more: Any) -> dict[str, Any]:
    return dict(
        at.s3.complete_multipart_upload(
            Bucket=at.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, **more
        )
    )


def whole(at: Place, key: str = "big", **more: Any) -> dict[str, Any]:
    """An object of a part of 5 MiB and one of four bytes."""
    upload = begin(at, key, **more)
    return finish(at, upload, [send(at, upload, 1, b"a" * LEAST, key), send(at, upload, 2, b"tail", key)], key)


def two_parts_make_one_object(at: Place) -> None:
    answer = whole(at, Metadata={"n": "ü".encode().hex()}, ContentType="text/plain")
    assert answer["ETag"].strip('"').endswith("-2")
    assert at.get("big") == b"a" * LEAST + b"tail"
    head = at.head("big")
    assert (head["ETag"], head["ContentLength"]) == (answer["ETag"], LEAST + 4)
    assert (head["ContentType"], head["Metadata"]) == ("text/plain", {"n": "c3bc"})


def one_small_part_is_enough(at: Place) -> None:
    upload = begin(at)
    answer = finish(at, upload, [send(at, upload, 1, b"small")])
    assert (answer["Bucket"], answer["Key"]) == (at.bucket, "big")
    assert answer["ETag"].strip('"').endswith("-1")
    assert at.get("big") == b"small"


def nothing_is_seen_before_the_end(at: Place) -> None:
    at.put("big", body=b"old")
    upload = begin(at)
    parts = [send(at, upload, 1, b"new")]
    assert at.get("big") == b"old"
    finish(at, upload, parts)
    assert at.get("big") == b"new"


def parts_are_listed_in_pages(at: Place) -> None:
    upload = begin(at)
    sent = [send(at, upload, number, bytes(number)) for number in (1, 2, 3)]
    asked = {"Bucket": at.bucket, "Key": "big", "UploadId": upload}
    answer = at.s3.list_parts(**asked)
    assert [(part["PartNumber"], part["ETag"]) for part in answer["Parts"]] == [
        (part["PartNumber"], part["ETag"]) for part in sent
    ]
    assert [part["Size"] for part in answer["Parts"]] == [1, 2, 3]
    answer = at.s3.list_parts(**asked, MaxParts=2)
    assert answer["IsTruncated"]
    assert [part["PartNumber"] for part in answer["Parts"]] == [1, 2]
    answer = at.s3.list_parts(**asked, PartNumberMarker=answer["NextPartNumberMarker"])
    assert [part["PartNumber"] for part in answer["Parts"]] == [3]
    pages = at.s3.get_paginator("list_parts").paginate(**asked, PaginationConfig={"PageSize": 2})
    assert [part["PartNumber"] for page in pages for part in page["Parts"]] == [1, 2, 3]


def open_uploads_are_listed(at: Place) -> None:
    uploads = {begin(at, key): key for key in ("x/1", "x/2", "y")}
    found = at.s3.list_multipart_uploads(Bucket=at.bucket)["Uploads"]
    assert {one["UploadId"]: one["Key"] for one in found} == uploads
    found = at.s3.list_multipart_uploads(Bucket=at.bucket, Prefix="x/")["Uploads"]
    assert [one["Key"] for one in found] == ["x/1", "x/2"]


def open_uploads_come_in_pages(at: Place) -> None:
    uploads = {begin(at, key) for key in ("a", "b", "c")}
    pages = at.s3.get_paginator("list_multipart_uploads").paginate(Bucket=at.bucket, PaginationConfig={"PageSize": 2})
    assert {one["UploadId"] for page in pages for one in page["Uploads"]} == uploads


def as_many_uploads_as_asked_for(at: Place) -> None:
    for key in ("a", "b", "c"):
        begin(at, key)
    answer = at.s3.list_multipart_uploads(Bucket=at.bucket, MaxUploads=2)
    assert answer["IsTruncated"]
    assert len(answer["Uploads"]) == 2


def two_uploads_of_one_key(at: Place) -> None:
    first, second = begin(at), begin(at)
    assert first != second
    finish(at, second, [send(at, second, 1, b"second")])
    assert [one["UploadId"] for one in at.s3.list_multipart_uploads(Bucket=at.bucket)["Uploads"]] == [first]
    finish(at, first, [send(at, first, 1, b"first")])
    assert at.get("big") == b"first"


def an_aborted_upload_is_gone(at: Place) -> None:
    upload = begin(at)
    send(at, upload, 1, b"x")
    at.s3.abort_multipart_upload(Bucket=at.bucket, Key="big", UploadId=upload)
    assert "Uploads" not in at.s3.list_multipart_uploads(Bucket=at.bucket)
    with refused("NoSuchUpload"):
        at.s3.list_parts(Bucket=at.bucket, Key="big", UploadId=upload)
    with refused("NoSuchUpload"):
        at.s3.abort_multipart_upload(Bucket=at.bucket, Key="big", UploadId=upload)
    assert at.keys() == []


def a_part_that_is_too_small(at: Place) -> None:
    upload = begin(at)
    parts = [send(at, upload, 1, b"small"), send(at, upload, 2, b"small")]
    with refused("EntityTooSmall"):
        finish(at, upload, parts)
    # It can be mended, and completed then.
    finish(at, upload, [send(at, upload, 1, bytes(LEAST)), parts[1]])
    assert at.head("big")["ContentLength"] == LEAST + 5


def a_wrong_etag(at: Place) -> None:
    upload = begin(at)
    send(at, upload, 1, b"x")
    with refused("InvalidPart"):
        finish(at, upload, [{"PartNumber": 1, "ETag": '"00000000000000000000000000000000"'}])


def a_part_that_was_not_sent(at: Place) -> None:
    upload = begin(at)
    part = send(at, upload, 1, b"x")
    with refused("InvalidPart"):
        finish(at, upload, [{"PartNumber": 7, "ETag": part["ETag"]}])


def parts_out_of_order(at: Place) -> None:
    upload = begin(at)
    parts = [send(at, upload, 1, bytes(LEAST)), send(at, upload, 2, bytes(LEAST))]
    with refused("InvalidPartOrder"):
        finish(at, upload, parts[::-1])


def no_parts_at_all(at: Place) -> None:
    upload = begin(at)
    with refused("MalformedXML"):
        finish(at, upload, [])


def a_part_sent_anew_counts_last(at: Place) -> None:
    upload = begin(at)
    send(at, upload, 1, b"first")
    finish(at, upload, [send(at, upload, 1, b"again")])
    assert at.get("big") == b"again"


def some_of_the_parts_are_enough(at: Place) -> None:
    upload = begin(at)
    parts = [send(at, upload, number, number.to_bytes() * LEAST) for number in (3, 1, 8)]
    finish(at, upload, [parts[1], parts[2]])
    assert at.get("big") == b"\1" * LEAST + b"\x08" * LEAST


def a_number_beyond_the_last(at: Place) -> None:
    upload = begin(at)
    with refused("InvalidArgument"):
        send(at, upload, 10001, b"x")
    send(at, upload, 10000, b"x")


def a_number_before_the_first(at: Place) -> None:
    upload = begin(at)
    with refused("InvalidArgument"):
        send(at, upload, 0, b"x")


def a_part_copied_from_an_object(at: Place) -> None:
    at.put("source", body=b"0123456789")
    upload = begin(at)
    answer = at.s3.upload_part_copy(
        Bucket=at.bucket, Key="big", UploadId=upload, PartNumber=1, CopySource={"Bucket": at.bucket, "Key": "source"}
    )
    finish(at, upload, [{"PartNumber": 1, "ETag": answer["CopyPartResult"]["ETag"]}])
    assert at.get("big") == b"0123456789"


def a_part_copied_from_a_range(at: Place) -> None:
    at.put("source ü+1", body=b"a" * LEAST + b"0123456789")
    upload, parts = begin(at), []
    for number, wanted in ((1, f"bytes=0-{LEAST - 1}"), (2, f"bytes={LEAST + 2}-{LEAST + 5}")):
        answer = at.s3.upload_part_copy(
            Bucket=at.bucket,
            Key="big",
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": at.bucket, "Key": "source ü+1"},
            CopySourceRange=wanted,
        )
        parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
    finish(at, upload, parts)
    assert at.get("big") == b"a" * LEAST + b"2345"


def a_part_copied_from_a_version(at: Place) -> None:
    at.keep_versions()
    old = at.put("source", body=b"old")["VersionId"]
    at.put("source", body=b"new")
    upload = begin(at)
    answer = at.s3.upload_part_copy(
        Bucket=at.bucket,
        Key="big",
        UploadId=upload,
        PartNumber=1,
        CopySource={"Bucket": at.bucket, "Key": "source", "VersionId": old},
    )
    finish(at, upload, [{"PartNumber": 1, "ETag": answer["CopyPartResult"]["ETag"]}])
    assert at.get("big") == b"old"


def a_part_copied_from_nothing(at: Place) -> None:
    upload = begin(at)
    with refused("NoSuchKey"):
        at.s3.upload_part_copy(
            Bucket=at.bucket, Key="big", UploadId=upload, PartNumber=1, CopySource=f"{at.bucket}/none"
        )


def a_part_is_read_by_its_number(at: Place) -> None:
    whole(at)
    assert at.get("big", PartNumber=2) == b"tail"


def a_part_is_asked_for_by_its_number(at: Place) -> None:
    whole(at)
    head = at.head("big", PartNumber=1)
    assert (head["ContentLength"], head["PartsCount"]) == (LEAST, 2)


def tags_are_told_at_the_start(at: Place) -> None:
    upload = begin(at, Tagging="a=1&b=2")
    finish(at, upload, [send(at, upload, 1, b"x")])
    answer = at.s3.get_object_tagging(Bucket=at.bucket, Key="big")
    assert answer["TagSet"] == [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}]


def rights_to_what_was_uploaded(at: Place) -> None:
    upload = begin(at)
    finish(at, upload, [send(at, upload, 1, b"x")])
    assert at.s3.get_object_acl(Bucket=at.bucket, Key="big")["Grants"][0]["Permission"] == "FULL_CONTROL"


def rights_are_told_at_the_start(at: Place) -> None:
    upload = begin(at, ACL="public-read")
    finish(at, upload, [send(at, upload, 1, b"x")])
    grants = at.s3.get_object_acl(Bucket=at.bucket, Key="big")["Grants"]
    assert [grant["Permission"] for grant in grants] == ["FULL_CONTROL", "READ"]


def an_end_only_where_nothing_is(at: Place) -> None:
    upload = begin(at)
    parts = [send(at, upload, 1, b"mine")]
    at.put("big", body=b"theirs")
    with refused("PreconditionFailed"):
        finish(at, upload, parts, IfNoneMatch="*")
    assert at.get("big") == b"theirs"


def an_upload_that_was_completed(at: Place) -> None:
    upload = begin(at)
    finish(at, upload, [send(at, upload, 1, b"x")])
    assert "Uploads" not in at.s3.list_multipart_uploads(Bucket=at.bucket)
    with refused("NoSuchUpload"):
        at.s3.list_parts(Bucket=at.bucket, Key="big", UploadId=upload)


def a_part_after_the_end(at: Place) -> None:
    upload = begin(at)
    at.s3.abort_multipart_upload(Bucket=at.bucket, Key="big", UploadId=upload)
    with refused("NoSuchUpload"):
        send(at, upload, 1, b"y")


def an_end_after_the_end(at: Place) -> None:
    upload = begin(at)
    part = send(at, upload, 1, b"x")
    at.s3.abort_multipart_upload(Bucket=at.bucket, Key="big", UploadId=upload)
    with refused("NoSuchUpload"):
        finish(at, upload, [part])


def a_copied_part_beyond_the_source(at: Place) -> None:
    at.put("source", body=b"0123456789")
    upload = begin(at)
    with refused("InvalidRange", "InvalidArgument"):
        at.s3.upload_part_copy(
            Bucket=at.bucket,
            Key="big",
            UploadId=upload,
            PartNumber=1,
            CopySource=f"{at.bucket}/source",
            CopySourceRange="bytes=20-30",
        )
