"""What a write may ask for: what nobody would do, or check, is refused and changes nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import botocore.loaders
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from s3transfer.exceptions import S3CopyFailedError

from dropforge.stack.answers import ServiceError
from dropforge.stack.writes import check_policy
from tests.stack.conftest import Server
from tests.stack.test_objects import BUCKET

MIB = 1 << 20
OLD = datetime(2020, 1, 1, tzinfo=UTC)
OTHER = '"00000000000000000000000000000000"'


def refusal(ask: Any, **given: Any) -> tuple[int, str]:
    """Status and code of what a client is refused; 0 if it is not."""
    try:
        ask(Bucket=given.pop("Bucket", BUCKET), **given)
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    return 0, ""


def read(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


@pytest.mark.parametrize(
    ("ask", "given"),
    [
        ("delete_objects", {"Delete": {"Objects": [{"Key": "a", "ETag": '"0"'}]}}),
        ("delete_objects", {"Delete": {"Objects": [{"Key": "a", "Size": 7}]}}),
        (
            "delete_objects",
            {"Delete": {"Objects": [{"Key": "a", "LastModifiedTime": datetime(2020, 1, 1, tzinfo=UTC)}]}},
        ),
        ("delete_object", {"Key": "a", "IfMatchSize": 7}),
        ("delete_object", {"Key": "a", "IfMatchLastModifiedTime": datetime(2020, 1, 1, tzinfo=UTC)}),
        ("put_object", {"Key": "a", "IfNoneMatch": '"0"'}),
        ("put_object", {"Key": "a", "WriteOffsetBytes": 1}),
        ("copy_object", {"Key": "a", "CopySource": f"{BUCKET}/b", "IfNoneMatch": '"0"'}),
    ],
)
def test_a_write_under_a_condition_that_nobody_checks_changes_nothing(
    server: Server, ask: str, given: dict[str, Any]
) -> None:
    client = server.client()
    for key in ("a", "b"):
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
    with pytest.raises(ClientError) as error:
        getattr(client, ask)(Bucket=BUCKET, **given)
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"a"


def test_a_part_is_copied_under_the_conditions_that_it_names(server: Server) -> None:
    client = server.client()
    etag = client.put_object(Bucket=BUCKET, Key="a", Body=b"x")["ETag"]
    changed = client.head_object(Bucket=BUCKET, Key="a")["LastModified"]
    part = {"Key": "m", "UploadId": client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"], "PartNumber": 1}

    def copied(**conditions: Any) -> tuple[int, str]:
        return refusal(client.upload_part_copy, **part, CopySource=f"{BUCKET}/a", **conditions)

    for bad in (
        {"CopySourceIfMatch": OTHER},
        {"CopySourceIfMatch": OTHER, "CopySourceIfUnmodifiedSince": changed},
        {"CopySourceIfNoneMatch": etag},
        {"CopySourceIfNoneMatch": etag, "CopySourceIfModifiedSince": OLD},
        {"CopySourceIfModifiedSince": changed},
        {"CopySourceIfUnmodifiedSince": OLD},
    ):
        assert copied(**bad) == (412, "PreconditionFailed"), bad
    assert "Parts" not in client.list_parts(Bucket=BUCKET, Key="m", UploadId=part["UploadId"])
    for good in (
        {"CopySourceIfMatch": etag, "CopySourceIfUnmodifiedSince": OLD},
        {"CopySourceIfNoneMatch": OTHER},
        {"CopySourceIfModifiedSince": OLD},
        {"CopySourceIfUnmodifiedSince": changed},
    ):
        assert copied(**good) == (0, ""), good
    headers = {"x-amz-copy-source": f"{BUCKET}/a", "x-amz-copy-source-if-modified-since": "never"}
    assert server.put(f"/{BUCKET}/c", b"", headers)[0] == 400


def test_a_large_copy_is_of_one_source(server: Server) -> None:
    """Its source is replaced between two of its parts."""
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"a" * (11 * MIB))
    asked = []

    def replace(**_: Any) -> None:
        asked.append(1)
        if len(asked) == 2:
            server.client().put_object(Bucket=BUCKET, Key="a", Body=b"b" * (11 * MIB))

    client.meta.events.register("before-call.s3.UploadPartCopy", replace)
    parts = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=6 * MIB, use_threads=False)
    with pytest.raises(S3CopyFailedError):
        client.copy({"Bucket": BUCKET, "Key": "a"}, BUCKET, "b", Config=parts)
    assert refusal(client.head_object, Key="b")[0] == 404


def test_a_bucket_of_another_account_is_not_there(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"a")
    for ask, given in (
        (client.put_object, {"Key": "a", "Body": b"b"}),
        (client.delete_object, {"Key": "a"}),
        (client.get_object, {"Key": "a"}),
        (client.list_objects_v2, {}),
        (client.delete_bucket, {}),
    ):
        assert refusal(ask, ExpectedBucketOwner="999999999999", **given) == (403, "AccessDenied")
    source = {"CopySource": f"{BUCKET}/a", "ExpectedSourceBucketOwner": "999999999999"}
    assert refusal(client.copy_object, Key="b", **source) == (403, "AccessDenied")
    assert refusal(client.put_object, Key="a", Body=b"mine", ExpectedBucketOwner="123456789012") == (0, "")
    assert read(client, "a") == b"mine"


def test_an_upload_ends_with_the_size_that_its_client_says(server: Server) -> None:
    client = server.client()
    upload = {"Key": "m", "UploadId": client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]}
    part = client.upload_part(Bucket=BUCKET, **upload, PartNumber=1, Body=b"hello")
    parts = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}}
    end = client.complete_multipart_upload
    assert refusal(end, **upload, **parts, MpuObjectSize=6) == (400, "InvalidRequest")
    assert refusal(client.head_object, Key="m")[0] == 404
    assert refusal(end, **upload, **parts, MpuObjectSize=5) == (0, "")
    assert read(client, "m") == b"hello"


def test_an_upload_that_has_a_condition_of_directory_buckets_goes_on(server: Server) -> None:
    client = server.client()
    upload = {"Key": "m", "UploadId": client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]}
    assert refusal(client.abort_multipart_upload, **upload, IfMatchInitiatedTime=OLD)[0] == 501
    client.abort_multipart_upload(Bucket=BUCKET, **upload)


def test_a_condition_in_a_link_is_one_too(server: Server) -> None:
    assert server.put(f"/{BUCKET}/k?x-amz-if-match-size=3", b"x")[0] == 501
    assert server.put(f"/{BUCKET}/k?x-amz-expected-bucket-owner=999999999999", b"x")[0] == 403
    assert server.put(f"/{BUCKET}/k?x-id=PutObject&x-anything=1", b"x", {"x-amz-meta-if-match": "y"})[0] == 200


def test_a_sub_resource_is_not_the_whole(server: Server) -> None:
    """Of every write that S3 has, and of some that it has not, no object and no bucket is changed."""
    client = server.client()
    # Read anew: clients take the bucket out of the addresses of operations that they have called, for all that follow.
    model = botocore.loaders.Loader().load_service_model("s3", "service-2")
    asked = [(one["http"]["method"], one["http"]["requestUri"]) for one in model["operations"].values()]
    writes = [
        (method, uri) for method, uri in asked if method not in {"GET", "HEAD"} and "?" in uri and "{Bucket}" in uri
    ]
    assert len(writes) > 40
    key = "/{Bucket}/{Key+}"
    unknown = [
        *[("PUT", f"{key}?{name}") for name in ("torrent", "select", "restore", "versions", "uploads", "attributes")],
        *[
            ("PUT", f"{key}?{name}")
            for name in (
                "partNumber=1",
                "uploadId=x",
                "versionId=x",
                "Tagging",
                "unknown",
                "tagging%20versionId",
                "%00",
            )
        ],
        *[("PUT", f"{key}?{name}") for name in ("annotation", "encryption", "renameObject", "acl&tagging")],
        *[("PUT", f"{key}?partNumber=1&uploadId=x&{name}") for name in ("tagging", "torrent")],
        *[("DELETE", f"{key}?{name}") for name in ("acl", "retention", "legal-hold", "partNumber=1", "annotation")],
        *[("POST", f"{key}{name}") for name in ("", "?acl", "?uploads&uploadId=x")],
        *[("DELETE", "/{Bucket}?" + name) for name in ("analytics&id=a", "inventory&id=a", "metrics&id=a", "acl")],
        *[("DELETE", "/{Bucket}?" + name) for name in ("metadataTable", "metadataConfiguration", "versioning")],
        *[("PUT", "/{Bucket}?" + name) for name in ("requestPayment", "abac", "analytics&id=a")],
        ("POST", "/{Bucket}?metadataTable"),
        ("PATCH", key),
    ]
    client.create_bucket(Bucket="empty")
    for method, uri in [*writes, *unknown]:
        client.put_object(Bucket=BUCKET, Key="k", Body=b"precious")
        path = uri.replace("{Bucket}", BUCKET if "{Key+}" in uri else "empty").replace("{Key+}", "k")
        status, text = server.put(path, b"", method=method)
        if (method, uri) in unknown:
            assert (status, "MethodNotAllowed" in text) == (405, True), (method, uri, text)
        assert read(client, "k") == b"precious", (method, uri, status)
        assert refusal(client.head_bucket, Bucket="empty") == (0, ""), (method, uri, status)
    client.delete_bucket(Bucket="empty")


STATEMENT = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": ["arn:aws:s3:::dropforge/no*"]}


@pytest.mark.parametrize(
    "policy",
    [
        "",
        "no json",
        "\xff",
        "[" * 100_000,
        "[]",
        "{}",
        '{"Statement": 5}',
        '{"Statement": [5]}',
        *(
            json.dumps({"Statement": [STATEMENT, {**STATEMENT, **more}]})
            for more in (
                {"Effect": 1},
                {"Action": 1},
                {"Action": []},
                {"Action": [{}]},
                {"Action": "s3:["},
                {"NotAction": "x"},
                {"NotResource": "x"},
                {"Resource": None},
                {"Condition": 1},
                {"Condition": {"StringEquals": 1}},
            )
        ),
        json.dumps({"Statement": {name: value for name, value in STATEMENT.items() if name != "Action"}}),
    ],
)
def test_a_policy_that_is_none(policy: str) -> None:
    with pytest.raises(ServiceError) as error:
        check_policy(policy.encode("latin-1"))
    assert error.value.code == "MalformedPolicy"


def test_a_policy_is_kept_if_it_is_one(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"a")
    assert refusal(client.put_bucket_policy, Policy='{"Statement": 5}') == (400, "MalformedPolicy")
    assert read(client, "a") == b"a"
    condition = {"StringEquals": {"aws:SourceAccount": ["1"]}}
    for statement in ([STATEMENT], STATEMENT, [{**STATEMENT, "Condition": condition}], []):
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Statement": statement}))
        assert read(client, "a") == b"a"
    client.delete_bucket_policy(Bucket=BUCKET)
