"""Signed addresses, used by programs that know no S3."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.stack.clients.place import Place

OLD, NEW = "s3", "s3v4"


def _ask(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    with urllib.request.urlopen(request) as answer:
        return answer.status, answer.read(), answer.headers


def _address(at: Place, signature: str, action: str, key: str, **more: Any) -> str:
    client = at.target.client("s3", signature)
    return str(client.generate_presigned_url(action, Params={"Bucket": at.bucket, "Key": key, **more}))


def _read(at: Place, signature: str) -> None:
    at.put("a b/ü+1", body=b"body")
    address = _address(at, signature, "get_object", "a b/ü+1", ResponseContentType="text/x-told")
    status, body, headers = _ask(address)
    assert (status, body, headers["Content-Type"]) == (200, b"body", "text/x-told")
    assert _ask(_address(at, signature, "head_object", "a b/ü+1"), "HEAD")[2]["Content-Length"] == "4"


def _write(at: Place, signature: str) -> None:
    address = _address(at, signature, "put_object", "a b/ü+1", ContentType="text/plain")
    status, _, headers = _ask(address, "PUT", b"written", **{"Content-Type": "text/plain"})
    assert (status, at.get("a b/ü+1")) == (200, b"written")
    assert headers["ETag"] == at.head("a b/ü+1")["ETag"]
    assert _ask(_address(at, signature, "delete_object", "a b/ü+1"), "DELETE")[0] == 204
    assert at.keys() == []


def reading_by_the_older_signature(at: Place) -> None:
    _read(at, OLD)


def reading_by_the_newer_signature(at: Place) -> None:
    _read(at, NEW)


def writing_by_the_older_signature(at: Place) -> None:
    _write(at, OLD)


def writing_by_the_newer_signature(at: Place) -> None:
    _write(at, NEW)


def ranges_and_conditions_of_a_signed_address(at: Place) -> None:
    etag = at.put("a", body=b"0123456789")["ETag"]
    address = _address(at, NEW, "get_object", "a")
    status, body, headers = _ask(address, Range="bytes=2-4")
    assert (status, body, headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    with pytest.raises(urllib.error.HTTPError) as error:
        _ask(address, **{"If-None-Match": etag})
    assert error.value.code == 304


def a_signed_address_of_a_version(at: Place) -> None:
    at.keep_versions()
    old = at.put("a", body=b"old")["VersionId"]
    at.put("a", body=b"new")
    assert _ask(_address(at, NEW, "get_object", "a", VersionId=old))[1] == b"old"


def a_signed_address_of_nothing(at: Place) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        _ask(_address(at, NEW, "get_object", "none"))
    assert error.value.code == 404
    assert b"<Code>NoSuchKey</Code>" in error.value.read()


def a_signed_listing(at: Place) -> None:
    at.put("a", "b")
    client = at.target.client("s3", NEW)
    body = _ask(client.generate_presigned_url("list_objects_v2", Params={"Bucket": at.bucket}))[1]
    assert b"<Key>a</Key>" in body
    assert b"<KeyCount>2</KeyCount>" in body


def a_signed_part_of_an_upload(at: Place) -> None:
    upload = at.s3.create_multipart_upload(Bucket=at.bucket, Key="a")["UploadId"]
    address = _address(at, NEW, "upload_part", "a", UploadId=upload, PartNumber=1)
    etag = _ask(address, "PUT", b"part", **{"Content-Type": "application/octet-stream"})[2]["ETag"]
    at.s3.complete_multipart_upload(
        Bucket=at.bucket, Key="a", UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
    )
    assert at.get("a") == b"part"


def _post(at: Place, signature: str, body: bytes, **fields: str) -> tuple[int, dict[str, str]]:
    """Send a form as a browser does."""
    conditions = [{name: value} for name, value in fields.items()]
    client = at.target.client("s3", signature)
    form = client.generate_presigned_post(at.bucket, "form/ü 1", Fields=dict(fields), Conditions=conditions)
    boundary = uuid.uuid4().hex
    lines = b""
    for name, value in form["fields"].items():
        lines += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    lines += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n'.encode()
    lines += b"Content-Type: application/octet-stream\r\n\r\n" + body + f"\r\n--{boundary}--\r\n".encode()
    where = urlsplit(form["url"])
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    connection.request("POST", where.path, lines, {"Content-Type": f"multipart/form-data; boundary={boundary}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, dict(answer.getheaders())


def a_form_by_the_older_signature(at: Place) -> None:
    assert _post(at, OLD, b"\0binary\r\n\xff")[0] == 204
    assert at.get("form/ü 1") == b"\0binary\r\n\xff"


def a_form_by_the_newer_signature(at: Place) -> None:
    assert _post(at, NEW, b"\0binary\r\n\xff")[0] == 204
    assert at.get("form/ü 1") == b"\0binary\r\n\xff"


def a_form_says_what_is_answered(at: Place) -> None:
    status, _ = _post(at, NEW, b"x", success_action_status="201")
    assert status == 201
    status, headers = _post(at, NEW, b"x", success_action_redirect="http://127.0.0.1/after")
    assert status == 303
    assert headers["Location"].startswith("http://127.0.0.1/after")


def a_form_tells_type_and_metadata(at: Place) -> None:
    _post(at, NEW, b"x", **{"Content-Type": "text/plain", "x-amz-meta-n": "1"})
    head = at.head("form/ü 1")
    assert (head["ContentType"], head["Metadata"]) == ("text/plain", {"n": "1"})
