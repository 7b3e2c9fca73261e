"""Objects: their keys, bodies, metadata, ranges and deletion."""

from __future__ import annotations

import io

from boto3.s3.transfer import TransferConfig

from tests.stack.clients.place import MIB, Place, refused

ODD_KEYS = (
    "ünïcödé/日本語/🦊",
    "with space/and two",
    "a+b",
    "100%25 %2F %",
    "a/../b",
    "..",
    "./a",
    "a//b",
    "//",
    "folder/",
    "quote'\"",
    "<tag>&amp;",
    "question?mark#hash",
    "semi;colon,comma=equals@at$",
    "back\\slash",
    "~tilde_-!*()",
    "x" * 1024,
)


def odd_keys_come_back(at: Place) -> None:
    for key in ODD_KEYS:
        at.put(key, body=key.encode())
    assert at.keys() == sorted(ODD_KEYS, key=str.encode)
    for key in ODD_KEYS:
        assert at.get(key) == key.encode()
        assert at.head(key)["ContentLength"] == len(key.encode())


def odd_keys_are_copied(at: Place) -> None:
    for key in ODD_KEYS:
        at.put(key, body=key.encode())
        at.s3.copy_object(Bucket=at.bucket, Key="copy", CopySource={"Bucket": at.bucket, "Key": key})
        assert at.get("copy") == key.encode()


def odd_keys_are_deleted(at: Place) -> None:
    at.put(*ODD_KEYS)
    for key in ODD_KEYS[::2]:
        at.s3.delete_object(Bucket=at.bucket, Key=key)
    wanted = [{"Key": key} for key in ODD_KEYS[1::2]]
    answer = at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": wanted})
    assert [item["Key"] for item in answer["Deleted"]] == list(ODD_KEYS[1::2])
    assert at.keys() == []


def a_key_that_is_too_long(at: Place) -> None:
    with refused("KeyTooLongError"):
        at.put("x" * 1025)


def an_empty_object(at: Place) -> None:
    assert at.put("empty", body=b"")["ETag"] == '"d41d8cd98f00b204e9800998ecf8427e"'
    assert at.get("empty") == b""
    assert at.head("empty")["ContentLength"] == 0


def a_write_replaces(at: Place) -> None:
    at.put("a", body=b"longer than what follows", Metadata={"n": "1"})
    at.put("a", body=b"short")
    assert at.get("a") == b"short"
    assert at.head("a")["Metadata"] == {}


def headers_come_back(at: Place) -> None:
    told = {
        "ContentType": "text/csv; charset=utf-8",
        "ContentEncoding": "identity",
        "ContentLanguage": "de",
        "ContentDisposition": 'attachment; filename="a.csv"',
        "CacheControl": "max-age=60",
    }
    at.put("a", **told)
    head = at.head("a")
    assert {name: head[name] for name in told} == told
    assert head["AcceptRanges"] == "bytes"


def the_type_of_what_was_not_told(at: Place) -> None:
    at.put("a")
    assert at.head("a")["ContentType"] == "binary/octet-stream"


def metadata_come_back(at: Place) -> None:
    told = {"one": "1", "with-dash": "a b  c", "case": "MiXed", "empty": ""}
    at.put("a", Metadata=told)
    assert at.head("a")["Metadata"] == told
    assert at.s3.get_object(Bucket=at.bucket, Key="a")["Metadata"] == told


def a_storage_class_comes_back(at: Place) -> None:
    at.put("a", StorageClass="STANDARD_IA")
    assert at.head("a")["StorageClass"] == "STANDARD_IA"
    assert at.s3.list_objects_v2(Bucket=at.bucket)["Contents"][0]["StorageClass"] == "STANDARD_IA"


def what_is_not_there(at: Place) -> None:
    with refused("NoSuchKey"):
        at.get("none")
    with refused("404"):
        at.head("none")
    assert at.s3.delete_object(Bucket=at.bucket, Key="none")["ResponseMetadata"]["HTTPStatusCode"] == 204


def ranges_of_bytes(at: Place) -> None:
    at.put("a", body=b"0123456789")
    for wanted, body, said in (
        ("bytes=0-3", b"0123", "bytes 0-3/10"),
        ("bytes=4-4", b"4", "bytes 4-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=5-999", b"56789", "bytes 5-9/10"),
    ):
        answer = at.s3.get_object(Bucket=at.bucket, Key="a", Range=wanted)
        assert (answer["Body"].read(), answer["ContentRange"]) == (body, said)
        assert answer["ContentLength"] == len(body)
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert at.head("a", Range="bytes=0-3")["ContentLength"] == 4


def a_suffix_longer_than_the_object(at: Place) -> None:
    at.put("a", body=b"0123456789")
    assert at.get("a", Range="bytes=-99") == b"0123456789"


def a_range_beyond_the_end(at: Place) -> None:
    at.put("a", body=b"0123456789")
    with refused("InvalidRange"):
        at.get("a", Range="bytes=10-20")
    at.put("empty", body=b"")
    with refused("InvalidRange"):
        at.get("empty", Range="bytes=0-1")


def a_thousand_keys_are_deleted_at_once(at: Place) -> None:
    # Only some are there: a missing one counts as deleted too.
    keys = [f"k/{number:04}" for number in range(1000)]
    at.put(*keys[::20], "other")
    answer = at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": [{"Key": key} for key in keys]})
    assert [item["Key"] for item in answer["Deleted"]] == keys
    assert "Errors" not in answer
    assert at.keys() == ["other"]


def a_quiet_delete_of_many(at: Place) -> None:
    at.put("a", "b")
    at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": [{"Key": "a"}, {"Key": "b"}], "Quiet": True})
    assert at.keys() == []


def a_quiet_delete_names_no_keys(at: Place) -> None:
    at.put("a")
    answer = at.s3.delete_objects(Bucket=at.bucket, Delete={"Objects": [{"Key": "a"}], "Quiet": True})
    assert "Deleted" not in answer


def parts_of_the_answer_are_told_by_the_reader(at: Place) -> None:
    at.put("a", ContentType="text/plain")
    answer = at.s3.get_object(
        Bucket=at.bucket,
        Key="a",
        ResponseContentType="application/json",
        ResponseContentDisposition="attachment; filename=b.json",
        ResponseCacheControl="no-cache",
        ResponseContentLanguage="fr",
        ResponseContentEncoding="identity",
    )
    assert answer["ContentType"] == "application/json"
    assert answer["ContentDisposition"] == "attachment; filename=b.json"
    assert (answer["CacheControl"], answer["ContentLanguage"]) == ("no-cache", "fr")
    assert at.head("a")["ContentType"] == "text/plain"


def twenty_megabytes_go_and_come(at: Place) -> None:
    body = bytes(range(256)) * (20 * MIB // 256)
    (at.path / "up").write_bytes(body)
    config = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB)
    at.s3.upload_file(str(at.path / "up"), at.bucket, "big", Config=config, ExtraArgs={"Metadata": {"n": "1"}})
    assert at.head("big")["ETag"].strip('"').endswith("-3")
    at.s3.download_file(at.bucket, "big", str(at.path / "down"), Config=config)
    assert (at.path / "down").read_bytes() == body
    at.s3.copy({"Bucket": at.bucket, "Key": "big"}, at.bucket, "copy", Config=config)
    head = at.head("copy")
    assert (head["ContentLength"], head["Metadata"]) == (20 * MIB, {"n": "1"})
    read = io.BytesIO()
    at.s3.download_fileobj(at.bucket, "copy", read, Config=config)
    assert read.getvalue() == body


def a_body_of_unknown_length(at: Place) -> None:
    at.s3.upload_fileobj(io.BytesIO(b"streamed"), at.bucket, "a")
    assert at.get("a") == b"streamed"


def attributes_of_an_object(at: Place) -> None:
    put = at.put("a", body=b"four")
    answer = at.s3.get_object_attributes(
        Bucket=at.bucket, Key="a", ObjectAttributes=["ETag", "ObjectSize", "StorageClass"]
    )
    assert answer["ETag"] == put["ETag"].strip('"')
    assert (answer["ObjectSize"], answer["StorageClass"]) == (4, "STANDARD")


def rows_are_selected(at: Place) -> None:
    at.put("rows.csv", body=b"name,age\nann,30\nbob,40")
    answer = at.s3.select_object_content(
        Bucket=at.bucket,
        Key="rows.csv",
        ExpressionType="SQL",
        Expression="SELECT * FROM S3Object",
        InputSerialization={"CSV": {"FileHeaderInfo": "USE"}},
        OutputSerialization={"JSON": {"RecordDelimiter": "\n"}},
    )
    rows = b"".join(event["Records"]["Payload"] for event in answer["Payload"] if "Records" in event)
    assert [row.replace(b" ", b"") for row in rows.splitlines()] == [
        b'{"name":"ann","age":"30"}',
        b'{"name":"bob","age":"40"}',
    ]
