"""Requests that real clients sign are believed; the same requests with anything changed are not."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import io
import json
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import botocore.session
import pytest
from botocore.auth import HmacV1Auth, S3SigV4Auth, SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.moto_server.werkzeug_app import MotoRequestHandler
from pyarrow import fs
from werkzeug.serving import make_server

from dropforge.stack.bodies import Bodies, Spool
from dropforge.stack.body import BodyError, read_body, wanted_digests
from dropforge.stack.post_policy import check_form
from dropforge.stack.signatures import SUBRESOURCES, ChunkSigner, SignatureError, Signed, check

Environ = dict[str, Any]

ACCESS, SECRET = "DFTEST", "wJalr+not/a=real key"
BUCKET = "dropforge"
# What AWS's documentation signs its examples with, and when.
AWS_ACCESS, AWS_SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
AWS_NOW = datetime(2013, 5, 24, 0, 1, tzinfo=UTC)
EMPTY = hashlib.sha256(b"").hexdigest()


class Quiet(MotoRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        pass


class Catcher:
    """A server that keeps what it is sent, as the real one would see it."""

    def __init__(self) -> None:
        self.caught: list[Environ] = []
        self.server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self.server.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> list[bytes]:
        whole = environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read(*[] if whole else [int(environ.get("CONTENT_LENGTH") or 0)])
        self.caught.append({**environ, "wsgi.input": io.BytesIO(body)})
        start_response("200 OK", [("ETag", '"x"'), ("Content-Length", "0")])
        return []

    def client(self, service: str = "s3", signature: str | None = "s3v4", **options: Any) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="eu-central-1",
            config=Config(signature_version=signature, retries={"total_max_attempts": 1}, **options),
        )

    def catch(self, ask: Callable[[], object]) -> Environ:
        """The one request that `ask` makes."""
        self.caught.clear()
        with contextlib.suppress(BotoCoreError, ClientError):  # the answers are empty
            ask()
        (found,) = self.caught
        return found

    def send(self, url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Environ:
        """The request that a plain HTTP client makes of a link."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
            connection.request(method, url.removeprefix(self.url), body, names)
            connection.getresponse().read()
            connection.close()

        return self.catch(ask)


@pytest.fixture(scope="module")
def catcher() -> Iterator[Catcher]:
    found = Catcher()
    yield found
    found.server.shutdown()


def believe(environ: Environ, now: datetime | None = None, access: str = ACCESS, secret: str = SECRET) -> Signed:
    before = {name: value for name, value in environ.items() if name != "wsgi.input"}
    found = check(environ, access, secret, now or datetime.now(UTC), environ["wsgi.input"].getvalue)
    assert before == {name: value for name, value in environ.items() if name != "wsgi.input"}
    return found


def refusal(environ: Environ, now: datetime | None = None, **keys: str) -> str:
    """The code of the refusal, which tells no secret."""
    with pytest.raises(SignatureError) as error:
        believe(environ, now, **keys)
    text = f"{error.value!r} {error.value.message}"
    assert SECRET not in text
    assert not re.search(r"[0-9a-f]{40}|[A-Za-z0-9+/]{27}=", text)
    assert error.value.status.startswith(("400 ", "403 "))
    return error.value.code


def changed(environ: Environ, name: str, old: str, new: str) -> Environ:
    assert old in environ[name], environ[name]
    return {**environ, name: environ[name].replace(old, new, 1)}


def hand_made(method: str, uri: str, headers: dict[str, str], body: bytes = b"") -> Environ:
    environ: Environ = {"REQUEST_METHOD": method, "RAW_URI": uri, "QUERY_STRING": uri.partition("?")[2]}
    for name, value in headers.items():
        variable = name.upper().replace("-", "_")
        variable = variable if variable in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{variable}"
        environ[variable] = value
    return {"CONTENT_LENGTH": str(len(body)), **environ, "wsgi.input": io.BytesIO(body)}


def signed_at(moment: datetime) -> str:
    return moment.strftime("%Y%m%dT%H%M%SZ")


# What clients send


ODD = "a b/../c//d+e%2Ff?g#h~i(j)*'ü日🦊=&;"
OPERATIONS: dict[str, Callable[[Any], object]] = {
    "put": lambda s3: s3.put_object(Bucket=BUCKET, Key="k", Body=b"hello", ContentType="text/plain"),
    "put an odd key": lambda s3: s3.put_object(Bucket=BUCKET, Key=ODD, Body=b"hello"),
    "put nothing": lambda s3: s3.put_object(Bucket=BUCKET, Key="k"),
    "put with metadata": lambda s3: s3.put_object(
        Bucket=BUCKET, Key="k", Body=b"x", Metadata={"my_key": "a  b   c", "my-key2": "", "x": "1,2"}
    ),
    "put a stream": lambda s3: s3.put_object(Bucket=BUCKET, Key="k", Body=io.BytesIO(b"y" * 70_000)),
    "put with SHA-256": lambda s3: s3.put_object(Bucket=BUCKET, Key="k", Body=b"x", ChecksumAlgorithm="SHA256"),
    "upload a part": lambda s3: s3.upload_part(Bucket=BUCKET, Key="k", UploadId="a+/=", PartNumber=1, Body=b"x"),
    "begin parts": lambda s3: s3.create_multipart_upload(Bucket=BUCKET, Key=ODD),
    "copy": lambda s3: s3.copy_object(Bucket=BUCKET, Key="k", CopySource={"Bucket": BUCKET, "Key": ODD}),
    "get": lambda s3: s3.get_object(Bucket=BUCKET, Key=ODD, Range="bytes=0-9"),
    "get as": lambda s3: s3.get_object(Bucket=BUCKET, Key="k", ResponseContentType="text/x; a=b"),
    "head": lambda s3: s3.head_object(Bucket=BUCKET, Key="k"),
    "list": lambda s3: s3.list_objects_v2(Bucket=BUCKET, Prefix="a b/+ü", Delimiter="/", StartAfter=""),
    "list buckets": lambda s3: s3.list_buckets(),
    "delete": lambda s3: s3.delete_object(Bucket=BUCKET, Key="k"),
    "delete many": lambda s3: s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}]}),
    "create bucket": lambda s3: s3.create_bucket(
        Bucket="other", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_what_boto3_signs(catcher: Catcher, signature: str, operation: str) -> None:
    environ = catcher.catch(lambda: OPERATIONS[operation](catcher.client(signature=signature)))
    assert environ["HTTP_AUTHORIZATION"].startswith("AWS4-HMAC-SHA256 " if signature == "s3v4" else "AWS DFTEST:")
    assert believe(environ) == Signed("s3")
    assert refusal(environ, secret="another") == "SignatureDoesNotMatch"
    assert refusal(environ, access="another") == "InvalidAccessKeyId"
    assert refusal({**environ, "REQUEST_METHOD": "PATCH"}) == "SignatureDoesNotMatch"
    assert refusal(changed(environ, "RAW_URI", "/", "/x")) == "SignatureDoesNotMatch"
    for minutes in (-16, 16):
        assert refusal(environ, datetime.now(UTC) + timedelta(minutes=minutes)) == "RequestTimeTooSkewed"
        assert believe(environ, datetime.now(UTC) + timedelta(minutes=minutes * 14 / 16)) == Signed("s3")


def test_what_boto3_signs_without_hashing_the_body(catcher: Catcher) -> None:
    client = catcher.client(s3={"payload_signing_enabled": False})
    environ = catcher.catch(lambda: client.put_object(Bucket=BUCKET, Key="k", Body=b"x"))
    assert environ["HTTP_X_AMZ_CONTENT_SHA256"] in {"UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
    assert believe(environ) == Signed("s3")


def put(catcher: Catcher) -> Environ:
    client = catcher.client()
    return catcher.catch(
        lambda: client.put_object(Bucket=BUCKET, Key="a/b", Body=b"hello", Metadata={"my_key": "v"}, ContentMD5="bQ==")
    )


CHANGES_OF_V4: dict[str, tuple[Callable[[Environ], Environ], str]] = {
    "method": (lambda e: {**e, "REQUEST_METHOD": "DELETE"}, "SignatureDoesNotMatch"),
    "path": (lambda e: changed(e, "RAW_URI", "a/b", "a/c"), "SignatureDoesNotMatch"),
    "one slash more": (lambda e: changed(e, "RAW_URI", "a/b", "a//b"), "SignatureDoesNotMatch"),
    "a parameter more": (lambda e: {**e, "RAW_URI": e["RAW_URI"] + "?acl"}, "SignatureDoesNotMatch"),
    "host": (lambda e: changed(e, "HTTP_HOST", "127.0.0.1", "localhost"), "SignatureDoesNotMatch"),
    "port": (lambda e: {**e, "HTTP_HOST": "127.0.0.1"}, "SignatureDoesNotMatch"),
    "metadata": (lambda e: {**e, "HTTP_X_AMZ_META_MY_KEY": "w"}, "SignatureDoesNotMatch"),
    "metadata left out": (lambda e: without(e, "HTTP_X_AMZ_META_MY_KEY"), "SignatureDoesNotMatch"),
    "metadata more": (lambda e: {**e, "HTTP_X_AMZ_META_Z": "w"}, "AccessDenied"),
    "a copy": (lambda e: {**e, "HTTP_X_AMZ_COPY_SOURCE": "dropforge/secret"}, "AccessDenied"),
    "MD5": (lambda e: {**e, "HTTP_CONTENT_MD5": "bg=="}, "SignatureDoesNotMatch"),
    "hash of the body": (lambda e: {**e, "HTTP_X_AMZ_CONTENT_SHA256": EMPTY}, "SignatureDoesNotMatch"),
    "body unsigned": (lambda e: {**e, "HTTP_X_AMZ_CONTENT_SHA256": "UNSIGNED-PAYLOAD"}, "SignatureDoesNotMatch"),
    "no hash": (lambda e: without(e, "HTTP_X_AMZ_CONTENT_SHA256"), "InvalidRequest"),
    "odd hash": (lambda e: {**e, "HTTP_X_AMZ_CONTENT_SHA256": EMPTY.upper()}, "InvalidArgument"),
    "hash not signed": (lambda e: changed(e, "HTTP_AUTHORIZATION", "x-amz-content-sha256;", ""), "AccessDenied"),
    "date": (
        lambda e: {
            **e,
            "HTTP_X_AMZ_DATE": e["HTTP_X_AMZ_DATE"][:-2] + ("0Z" if e["HTTP_X_AMZ_DATE"][-2] != "0" else "1Z"),
        },
        "SignatureDoesNotMatch",
    ),
    "no date": (lambda e: without(e, "HTTP_X_AMZ_DATE"), "AccessDenied"),
    "odd date": (lambda e: {**e, "HTTP_X_AMZ_DATE": "yesterday"}, "AccessDenied"),
    "impossible date": (lambda e: {**e, "HTTP_X_AMZ_DATE": "20269931T000000Z"}, "AccessDenied"),
    "date past all time zones": (
        lambda e: {**without(e, "HTTP_X_AMZ_DATE"), "HTTP_DATE": "Fri, 31 Dec 9999 23:59:59 -1200"},
        "AccessDenied",
    ),
    "region": (lambda e: changed(e, "HTTP_AUTHORIZATION", "eu-central-1", "us-east-1"), "SignatureDoesNotMatch"),
    "service": (lambda e: changed(e, "HTTP_AUTHORIZATION", "/s3/", "/iam/"), "SignatureDoesNotMatch"),
    "day of the scope": (lambda e: scope_of(e, day="20010101"), "AuthorizationHeaderMalformed"),
    "key": (lambda e: changed(e, "HTTP_AUTHORIZATION", ACCESS, "DFTESTX"), "InvalidAccessKeyId"),
    "end of the scope": (
        lambda e: changed(e, "HTTP_AUTHORIZATION", "aws4_request", "aws5"),
        "AuthorizationHeaderMalformed",
    ),
    "no scope": (
        lambda e: changed(e, "HTTP_AUTHORIZATION", "/s3/aws4_request", ""),
        "AuthorizationHeaderMalformed",
    ),
    "host not signed": (lambda e: changed(e, "HTTP_AUTHORIZATION", "host;", ""), "AuthorizationHeaderMalformed"),
    "twice": (
        lambda e: {**e, "HTTP_AUTHORIZATION": e["HTTP_AUTHORIZATION"] + ", Signature=0"},
        "AuthorizationHeaderMalformed",
    ),
    "two headers": (
        lambda e: {**e, "HTTP_AUTHORIZATION": ",".join([e["HTTP_AUTHORIZATION"]] * 2)},
        "AuthorizationHeaderMalformed",
    ),
    "no signature": (lambda e: changed(e, "HTTP_AUTHORIZATION", "Signature=", "X="), "AuthorizationHeaderMalformed"),
    "empty signature": (
        lambda e: {**e, "HTTP_AUTHORIZATION": re.sub("Signature=.*", "Signature=", e["HTTP_AUTHORIZATION"])},
        "SignatureDoesNotMatch",
    ),
    "signature not ASCII": (
        lambda e: {**e, "HTTP_AUTHORIZATION": re.sub("Signature=.*", "Signature=\xff", e["HTTP_AUTHORIZATION"])},
        "SignatureDoesNotMatch",
    ),
    "nothing but the name": (
        lambda e: {**e, "HTTP_AUTHORIZATION": "AWS4-HMAC-SHA256"},
        "AuthorizationHeaderMalformed",
    ),
    "other scheme": (lambda e: {**e, "HTTP_AUTHORIZATION": "Bearer abc"}, "InvalidArgument"),
    "asymmetric": (
        lambda e: changed(e, "HTTP_AUTHORIZATION", "AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"),
        "InvalidArgument",
    ),
    "no authorization": (lambda e: without(e, "HTTP_AUTHORIZATION"), "AccessDenied"),
    "a fragment": (lambda e: {**e, "RAW_URI": e["RAW_URI"] + "#x"}, "InvalidURI"),
    "a whole address": (lambda e: {**e, "RAW_URI": "http://127.0.0.1" + e["RAW_URI"]}, "InvalidURI"),
}


def without(environ: Environ, name: str) -> Environ:
    assert name in environ
    return {key: value for key, value in environ.items() if key != name}


def scope_of(environ: Environ, day: str) -> Environ:
    return {**environ, "HTTP_AUTHORIZATION": re.sub(r"/\d{8}/", f"/{day}/", environ["HTTP_AUTHORIZATION"])}


def test_nothing_signed_can_be_changed(catcher: Catcher) -> None:
    environ = put(catcher)
    assert believe(environ) == Signed("s3")
    found = {name: refusal(change(environ)) for name, (change, _) in CHANGES_OF_V4.items()}
    assert found == {name: code for name, (_, code) in CHANGES_OF_V4.items()}
    # What is not signed may change on the way.
    assert believe({**environ, "HTTP_USER_AGENT": "x", "HTTP_EXPECT": "y", "HTTP_X_AMZN_TRACE_ID": "z"})


@pytest.mark.parametrize(("signed", "sent"), [("a-b", "a_b"), ("a_b", "a-b"), ("a_b-c", "a-b_c")])
@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_metadata_cannot_be_spelled_in_another_way(catcher: Catcher, signature: str, signed: str, sent: str) -> None:
    client = catcher.client(signature=signature)
    environ = catcher.catch(lambda: client.put_object(Bucket=BUCKET, Key="k", Body=b"x", Metadata={signed: "1"}))
    assert believe(environ) == Signed("s3")
    spelled = {"HTTP_X_AMZ_META_" + sent.upper().replace("-", "_"): f"x-amz-meta-{sent}"} if "_" in sent else {}
    code = "AccessDenied" if signature == "s3v4" else "SignatureDoesNotMatch"
    assert refusal({**environ, "moto.preserved_header_names": spelled}) == code


def test_of_metadata_in_two_spellings_none_can_be_left_out(catcher: Catcher) -> None:
    headers = {"x-amz-meta-a_b": "1", "x-amz-meta-a-b": "1", "x-amz-content-sha256": EMPTY}
    request = AWSRequest("PUT", f"{catcher.url}/{BUCKET}/k", headers=headers)
    S3SigV4Auth(Credentials(ACCESS, SECRET), "s3", "us-east-1").add_auth(request)
    told = {name.replace("-", "_"): value for name, value in request.headers.items() if name != "x-amz-meta-a_b"}
    assert refusal(catcher.send(f"/{BUCKET}/k", "PUT", **told)) == "SignatureDoesNotMatch"


def test_version_2_does_not_take_what_it_does_not_sign(catcher: Catcher) -> None:
    client = catcher.client(signature="s3")
    environ = catcher.catch(lambda: client.list_objects_v2(Bucket=BUCKET, Prefix="a"))
    assert believe(environ) == Signed("s3")
    link = catcher.send(client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "k"}))
    for name in sorted(SUBRESOURCES):
        for found in (environ, link):
            for added in (f"&{name}", f"&{name}=", f"&{quote(name[0])}{name[1:]}=1"):
                assert refusal({**found, "RAW_URI": found["RAW_URI"] + added}) == "InvalidRequest"


def test_all_sub_resources_that_version_2_does_not_sign_are_known() -> None:
    model = botocore.session.get_session().get_service_model("s3")
    uris = [model.operation_model(name).http["requestUri"] for name in model.operation_names]
    known = {part.partition("=")[0] for uri in uris for part in uri.partition("?")[2].split("&")} - {"", "list-type"}
    assert known - set(HmacV1Auth.QSAOfInterest) <= SUBRESOURCES


def test_one_parameter_cannot_be_changed(catcher: Catcher) -> None:
    client = catcher.client()
    environ = catcher.catch(lambda: client.list_objects_v2(Bucket=BUCKET, Prefix="a", MaxKeys=7))
    assert believe(environ) == Signed("s3")
    for old, new in [("prefix=a", "prefix=b"), ("max-keys=7", "max-keys=8"), ("prefix=a", "prefix"), ("&", "&x&")]:
        assert refusal(changed(environ, "RAW_URI", old, new)) == "SignatureDoesNotMatch"
    uri = environ["RAW_URI"]
    path, _, query = uri.partition("?")
    assert believe({**environ, "RAW_URI": f"{path}?{'&'.join(reversed(query.split('&')))}"}) == Signed("s3")


def test_expect_and_chunked_transfer(catcher: Catcher) -> None:
    """A stream of unknown length: the transfer is chunked, the client waits for leave to send."""
    client = catcher.client()
    environ = catcher.catch(lambda: client.put_object(Bucket=BUCKET, Key="k", Body=io.BytesIO(b"x" * 100)))
    environ |= {"HTTP_EXPECT": "100-continue", "HTTP_TRANSFER_ENCODING": "chunked"}
    assert believe(environ) == Signed("s3")


def test_duplicate_and_padded_headers(catcher: Catcher) -> None:
    environ = put(catcher)
    moment = environ["HTTP_X_AMZ_DATE"]
    headers = ["host", "x-amz-content-sha256", "x-amz-date", "x-amz-meta-a"]
    for sent, canonical in [("1,2", "1,2"), ("  1   2 ", "1 2"), ("日本\u3000東", "日本\u3000東"), ("", "")]:
        lines = f"host:h\nx-amz-content-sha256:{EMPTY}\nx-amz-date:{moment}\nx-amz-meta-a:{canonical}\n"
        text = f"GET\n/b\n\n{lines}\n{';'.join(headers)}\n{EMPTY}"
        scope = f"{moment[:8]}/r/s3/aws4_request"
        claim = (
            f"Credential={ACCESS}/{scope},SignedHeaders={';'.join(headers)},Signature={sign_v4(text, moment, scope)}"
        )
        wire = {
            "Host": "h",
            "X-Amz-Content-SHA256": EMPTY,
            "X-Amz-Date": moment,
            "X-Amz-Meta-A": sent.encode().decode("latin-1"),
            "Authorization": f"AWS4-HMAC-SHA256 {claim}",
        }
        assert believe(hand_made("GET", "/b", wire)) == Signed("s3")


def sign_v4(canonical: str, moment: str, scope: str, secret: str = SECRET) -> str:
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return sign_text(f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}", scope, secret)


def sign_text(text: str, scope: str, secret: str = SECRET) -> str:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_a_parameter_without_value(catcher: Catcher, signature: str) -> None:
    """rclone sends `uploads=` and signs `uploads` with version 2."""
    client = catcher.client(signature=signature)
    environ = catcher.catch(lambda: client.create_multipart_upload(Bucket=BUCKET, Key="k"))
    assert environ["RAW_URI"].endswith("/k?uploads")
    assert believe({**environ, "RAW_URI": environ["RAW_URI"] + "="}) == Signed("s3")
    assert refusal({**environ, "RAW_URI": environ["RAW_URI"] + "=1"}) == "SignatureDoesNotMatch"


def test_what_arrow_signs(catcher: Catcher) -> None:
    """AWS's library for C++, as pyarrow has it."""
    arrow = fs.S3FileSystem(
        access_key=ACCESS,
        secret_key=SECRET,
        endpoint_override=catcher.url.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )
    catcher.caught.clear()
    for ask in (
        lambda: arrow.open_output_stream(f"{BUCKET}/ü+(x)/a b.txt").close(),
        lambda: arrow.get_file_info(fs.FileSelector(f"{BUCKET}/ü+(x)")),
        lambda: arrow.get_file_info(f"{BUCKET}/a b"),
        lambda: arrow.copy_file(f"{BUCKET}/a b", f"{BUCKET}/ü"),
    ):
        with contextlib.suppress(OSError):  # the answers are empty
            ask()
    assert {environ["REQUEST_METHOD"] for environ in catcher.caught} >= {"GET", "HEAD", "PUT"}
    for environ in catcher.caught:
        assert believe(environ) == Signed("s3")
        assert refusal(environ, secret="another") == "SignatureDoesNotMatch"


# AWS's documentation


DOCUMENTED = [
    (
        "GET",
        "/test.txt",
        {"Range": "bytes=0-9"},
        EMPTY,
        "host;range;x-amz-content-sha256;x-amz-date",
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    (
        "PUT",
        "/test%24file.text",
        {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
        "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
        "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    (
        "GET",
        "/?lifecycle",
        {},
        EMPTY,
        "host;x-amz-content-sha256;x-amz-date",
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    (
        "GET",
        "/?max-keys=2&prefix=J",
        {},
        EMPTY,
        "host;x-amz-content-sha256;x-amz-date",
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
]


@pytest.mark.parametrize(("method", "uri", "headers", "payload", "names", "signature"), DOCUMENTED)
def test_examples_of_the_documentation(
    method: str, uri: str, headers: dict[str, str], payload: str, names: str, signature: str
) -> None:
    claim = f"Credential={AWS_ACCESS}/20130524/us-east-1/s3/aws4_request,SignedHeaders={names},Signature={signature}"
    headers = {
        **headers,
        "Host": "examplebucket.s3.amazonaws.com",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": payload,
        "Authorization": f"AWS4-HMAC-SHA256 {claim}",
    }
    environ = hand_made(method, uri, headers)
    assert believe(environ, AWS_NOW, AWS_ACCESS, AWS_SECRET) == Signed("s3")
    if uri.startswith("/test%24"):  # clients may leave in the address what need not be encoded there
        assert believe({**environ, "RAW_URI": "/test$file.text"}, AWS_NOW, AWS_ACCESS, AWS_SECRET) == Signed("s3")


def test_the_documented_links() -> None:
    uri = (
        "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3"
        "%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature="
        "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )
    keys = {"access": AWS_ACCESS, "secret": AWS_SECRET}
    environ = hand_made("GET", uri, {"Host": "examplebucket.s3.amazonaws.com"})
    assert believe(environ, AWS_NOW, **keys) == Signed("s3")
    plain = {**environ, "RAW_URI": uri.replace("%2F", "/")}
    assert believe(plain, AWS_NOW, **keys) == Signed("s3")
    assert believe(environ, AWS_NOW.replace(hour=23, minute=59), **keys) == Signed("s3")
    assert refusal(environ, AWS_NOW + timedelta(days=1), **keys) == "AccessDenied"
    older = {
        "Date": "Tue, 27 Mar 2007 19:36:42 +0000",
        "Authorization": f"AWS {AWS_ACCESS}:qgk2+6Sv9/oM7G3qLEjTH1a1l1g=",
    }
    environ = hand_made("GET", "/awsexamplebucket1/photos/puppy.jpg", older)
    assert believe(environ, datetime(2007, 3, 27, 19, 40, tzinfo=UTC), **keys) == Signed("s3")


# Links


def link(catcher: Catcher, method: str = "put_object", signature: str = "s3v4", expires: int = 60, **more: Any) -> str:
    client = catcher.client(signature=signature)
    return str(client.generate_presigned_url(method, {"Bucket": BUCKET, "Key": ODD, **more}, expires))


@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_links_that_boto3_makes(catcher: Catcher, signature: str) -> None:
    get = catcher.send(link(catcher, "get_object", signature, ResponseContentDisposition='attachment; filename="ü x"'))
    assert believe(get) == Signed("s3")
    assert refusal({**get, "REQUEST_METHOD": "HEAD"}) == "SignatureDoesNotMatch"
    assert refusal({**get, "REQUEST_METHOD": "PUT"}) == "SignatureDoesNotMatch"
    assert refusal(changed(get, "RAW_URI", "attachment", "inline")) == "SignatureDoesNotMatch"
    assert refusal(changed(get, "RAW_URI", "dropforge/", "dropforge/x")) == "SignatureDoesNotMatch"
    assert refusal(changed(get, "RAW_URI", ACCESS, "OTHER")) == "InvalidAccessKeyId"
    assert refusal(get, secret="another") == "SignatureDoesNotMatch"
    assert refusal(get, datetime.now(UTC) + timedelta(seconds=62)) == "AccessDenied"
    assert refusal({**get, "RAW_URI": get["RAW_URI"].replace("?", "#?")}) == "InvalidURI"
    late = datetime.now(UTC) + timedelta(hours=1)
    for name in ("X-Amz-Expires", "Expires"):
        longer = re.sub(rf"([?&]{name}=)\d+", r"\g<1>" + ("604800" if "X" in name else "9999999999"), get["RAW_URI"])
        if longer != get["RAW_URI"]:
            assert refusal({**get, "RAW_URI": longer}, late) == "SignatureDoesNotMatch"
    put = catcher.send(link(catcher, signature=signature), "PUT", b"anything")
    assert believe(put) == Signed("s3")
    for stolen in ({"HTTP_X_AMZ_COPY_SOURCE": "dropforge/secret"}, {"HTTP_X_AMZ_META_A": "b"}):
        assert refusal({**put, **stolen}) == ("AccessDenied" if signature == "s3v4" else "SignatureDoesNotMatch")
    assert refusal({**put, "RAW_URI": put["RAW_URI"] + "&uploadId=7"}) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_links_with_headers(catcher: Catcher, signature: str) -> None:
    url = link(catcher, signature=signature, ContentType="text/x", Metadata={"a_b": "1"}, ContentMD5="bQ==")
    headers = {"Content_Type": "text/x", "Content_MD5": "bQ=="}
    sent = catcher.send(url, "PUT", b"x", **headers)
    # The metadata's name has an underscore, which `send` would make a dash.
    sent |= {"HTTP_X_AMZ_META_A_B": "1", "moto.preserved_header_names": {"HTTP_X_AMZ_META_A_B": "x-amz-meta-a_b"}}
    assert believe(sent) == Signed("s3")
    assert refusal({**sent, "CONTENT_TYPE": "text/y"}) == "SignatureDoesNotMatch"
    assert refusal({**sent, "HTTP_X_AMZ_META_A_B": "2"}) == "SignatureDoesNotMatch"
    assert refusal({**sent, "HTTP_CONTENT_MD5": "bg=="}) == "SignatureDoesNotMatch"
    if signature == "s3":
        assert believe(catcher.send(url, "PUT", b"x")) == Signed("s3")
    else:
        assert refusal(catcher.send(url, "PUT", b"x")) == "SignatureDoesNotMatch"


def test_malformed_links(catcher: Catcher) -> None:
    environ = catcher.send(link(catcher, "get_object"))
    uri = environ["RAW_URI"]
    parameters = ["Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature"]
    wrong = [re.sub(rf"X-Amz-{name}=[^&]*&?", "", uri) for name in parameters]
    wrong += [uri + f"&X-Amz-{name}=1" for name in parameters]
    for name, values in {
        "Algorithm": ["AWS4-ECDSA-P256-SHA256", ""],
        "Credential": ["", ACCESS, f"{ACCESS}/20010101/eu-central-1/s3/aws4_request"],
        "Date": ["", "20010101", "20260229T000000Z", "Fri, 24 May 2013 00:00:00 GMT"],
        "Expires": ["", "-1", "1.5", "x", "604801", "9" * 99, "٣"],
        "SignedHeaders": ["", "range"],
    }.items():
        wrong += [re.sub(rf"X-Amz-{name}=[^&]*", f"X-Amz-{name}={quote(value)}", uri) for value in values]
    for bad in wrong:
        assert refusal({**environ, "RAW_URI": bad}) == "AuthorizationQueryParametersError", bad
    assert (
        refusal({**environ, "RAW_URI": uri + "&X-Amz-Content-Sha256=" + EMPTY}) == "AuthorizationQueryParametersError"
    )
    assert refusal(environ, datetime.now(UTC) - timedelta(minutes=16)) == "AccessDenied"
    older = catcher.send(link(catcher, "get_object", "s3"))
    uri = older["RAW_URI"]
    for bad in [
        re.sub(r"&Expires=\d+", "", uri),
        re.sub(r"&Expires=\d+", "&Expires=x", uri),
        re.sub(r"&Signature=[^&]*", "", uri),
        uri + "&Expires=9999999999",
        uri + f"&AWSAccessKeyId={ACCESS}",
    ]:
        assert refusal({**older, "RAW_URI": bad}) == "AccessDenied", bad
    assert refusal({**older, "HTTP_X_AMZ_CONTENT_SHA256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}) == "InvalidArgument"


def test_a_link_whose_body_is_signed(catcher: Catcher) -> None:
    """Clients other than boto3 say in the link that its body is not signed."""
    moment = signed_at(datetime.now(UTC))
    scope = f"{moment[:8]}/r/s3/aws4_request"
    query = (
        f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Content-Sha256=UNSIGNED-PAYLOAD&X-Amz-Credential={ACCESS}%2F"
        f"{scope.replace('/', '%2F')}&X-Amz-Date={moment}&X-Amz-Expires=60&X-Amz-SignedHeaders=host&x-id=PutObject"
    )
    signature = sign_v4(f"PUT\n/b/k\n{query}\nhost:h\n\nhost\nUNSIGNED-PAYLOAD", moment, scope)
    environ = hand_made("PUT", f"/b/k?{query}&X-Amz-Signature={signature}", {"Host": "h"})
    assert believe(environ) == Signed("s3")
    assert believe({**environ, "HTTP_X_AMZ_CONTENT_SHA256": "UNSIGNED-PAYLOAD"}) == Signed("s3")
    # Chunks have nothing to be checked with, so reading the body refuses them.
    assert believe({**environ, "HTTP_X_AMZ_CONTENT_SHA256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}).chunk_signer is None


# Any key


class Sent:
    """A client that sends nothing: `catch` gives the request as the wire would show it."""

    def __init__(self, signature: str) -> None:
        config = Config(signature_version=signature, s3={"addressing_style": "path"})
        self.client = boto3.client(
            "s3",
            endpoint_url="http://127.0.0.1:9000",
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="eu-central-1",
            config=config,
        )
        self.client.meta.events.register("before-send", self._keep)

    def _keep(self, request: Any, **_: object) -> AWSResponse:
        split = urlsplit(request.url)
        headers = {
            name: value.decode() if isinstance(value, bytes) else str(value) for name, value in request.headers.items()
        }
        uri = split.path + (f"?{split.query}" if split.query else "")
        self.environ = hand_made(request.method, uri, {"Host": split.netloc, **headers})
        return AWSResponse(request.url, 200, {}, Raw())  # type: ignore[arg-type]

    def put(self, key: str) -> Environ:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        return self.environ

    def link(self, key: str) -> Environ:
        url = urlsplit(self.client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key}))
        return hand_made("GET", f"{url.path}?{url.query}", {"Host": url.netloc})


class Raw:
    def stream(self, **_: object) -> Iterator[bytes]:
        return iter(())


SENT = {signature: Sent(signature) for signature in ("s3v4", "s3")}
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.text(
    st.sampled_from("a/.+%2F?#&=; ~*'()[]\\\r\n\t\0ü日🦊"), min_size=1, max_size=40
)


@pytest.mark.parametrize("signature", SENT)
@settings(max_examples=60, deadline=None)
@given(key=KEYS)
def test_any_key(signature: str, key: str) -> None:
    for environ in (SENT[signature].put(key), SENT[signature].link(key)):
        assert believe(environ) == Signed("s3")
        path, mark, query = environ["RAW_URI"].partition("?")
        assert refusal({**environ, "RAW_URI": f"{path}x{mark}{query}"}) == "SignatureDoesNotMatch"


@settings(max_examples=60, deadline=None)
@given(
    uri=st.text(st.characters(max_codepoint=255), max_size=60),
    claim=st.text(st.characters(max_codepoint=255), max_size=60),
    headers=st.dictionaries(
        st.sampled_from(["X-Amz-Date", "Date", "X-Amz-Content-SHA256", "Host"]), st.text(max_size=20)
    ),
    scheme=st.sampled_from(["", "AWS ", "AWS4-HMAC-SHA256 "]),
)
def test_nonsense_is_refused(uri: str, claim: str, headers: dict[str, str], scheme: str) -> None:
    refusal(hand_made("GET", f"/{uri}", {**headers, "Authorization": scheme + claim}))
    refusal(hand_made("GET", f"/?AWSAccessKeyId={ACCESS}&Expires=9999999999&Signature={claim}&{uri}", headers))
    refusal(hand_made("GET", f"/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={claim}&{uri}", headers))


# The queue


def test_a_message_is_signed_with_its_body(catcher: Catcher) -> None:
    client = catcher.client("sqs", None)
    environ = catcher.catch(lambda: client.send_message(QueueUrl=f"{catcher.url}/1/q", MessageBody="hellö"))
    assert believe(environ) == Signed("sqs")
    other = {**environ, "wsgi.input": io.BytesIO(environ["wsgi.input"].getvalue().replace(b"hell", b"help"))}
    assert refusal(other) == "SignatureDoesNotMatch"
    assert refusal(changed(environ, "HTTP_X_AMZ_TARGET", "Send", "Delete")) == "SignatureDoesNotMatch"
    assert refusal(changed(environ, "CONTENT_TYPE", "json", "xml")) == "SignatureDoesNotMatch"
    assert refusal(changed(environ, "HTTP_AUTHORIZATION", "/sqs/", "/s3/")) == "InvalidRequest"
    assert refusal({**environ, "HTTP_X_AMZ_CONTENT_SHA256": "UNSIGNED-PAYLOAD"}) == "SignatureDoesNotMatch"
    assert refusal(environ, datetime.now(UTC) + timedelta(minutes=16)) == "RequestTimeTooSkewed"
    unread = {**environ, "HTTP_AUTHORIZATION": environ["HTTP_AUTHORIZATION"].replace(ACCESS, "OTHER")}
    with pytest.raises(SignatureError, match="access key"):
        check(unread, ACCESS, SECRET, datetime.now(UTC), lambda: pytest.fail("the body of a stranger is not read"))


@pytest.mark.parametrize("signer", [SigV4Auth, SigV4QueryAuth])
def test_paths_of_other_services_are_normalised_and_encoded_twice(signer: Any) -> None:
    request = AWSRequest("GET", "http://127.0.0.1:1/1//a%20b/../c%2Bd?Action=X%20Y")
    signer(Credentials(ACCESS, SECRET), "sqs", "r").add_auth(request)
    url = urlsplit(request.url)
    environ = hand_made("GET", f"{url.path}?{url.query}", {"Host": url.netloc, **dict(request.headers.items())})
    assert believe(environ) == Signed("sqs")
    assert refusal(changed(environ, "RAW_URI", "c%2Bd", "c%2Be")) == "SignatureDoesNotMatch"
    assert refusal({**environ, "wsgi.input": io.BytesIO(b"x")}) == "SignatureDoesNotMatch"


# Signed chunks


SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
# The documentation's two uploads of 65 KiB: seed, the chunks, and what comes after them.
UPLOADS = {
    SIGNED: (
        "content-encoding;content-length;host;x-amz-content-sha256;x-amz-date;x-amz-decoded-content-length;"
        "x-amz-storage-class",
        "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
        [
            "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
            "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
            "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
        ],
        b"",
    ),
    f"{SIGNED}-TRAILER": (
        "content-encoding;host;x-amz-content-sha256;x-amz-date;x-amz-decoded-content-length;x-amz-storage-class;"
        "x-amz-trailer",
        "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
        [
            "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
            "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
            "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
        ],
        b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
        b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n",
    ),
}


def upload(kind: str) -> tuple[Environ, bytes]:
    names, seed, signatures, trailer = UPLOADS[kind]
    claim = f"Credential={AWS_ACCESS}/20130524/us-east-1/s3/aws4_request, SignedHeaders={names}, Signature={seed}"
    headers = {
        "Host": "s3.amazonaws.com",
        "x-amz-date": "20130524T000000Z",
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
        "x-amz-content-sha256": kind,
        "Content-Encoding": "aws-chunked",
        "x-amz-decoded-content-length": "66560",
        "Content-Length": "66824",
        "Authorization": f"AWS4-HMAC-SHA256 {claim}",
    }
    if trailer:
        headers["x-amz-trailer"] = "x-amz-checksum-crc32c"
    body = b""
    for size, signature in zip((65536, 1024, 0), signatures, strict=True):
        body += f"{size:x};chunk-signature={signature}\r\n".encode() + b"a" * size + (b"\r\n" if size else b"")
    return hand_made("PUT", "/examplebucket/chunkObject.txt", headers), body + trailer + b"\r\n"


def stored(spool: Spool, folder: Path) -> bytes:
    return b"".join(
        block for piece in spool.pieces for block in Bodies(folder, lambda _: bytes(spool.small or b"")).blocks(piece)
    )


def read(environ: Environ, body: bytes | io.RawIOBase, signer: ChunkSigner | None, folder: Path) -> bytes | str:
    """What arrives in the spool, or the code of the refusal."""
    size = len(body) if isinstance(body, bytes) else int(environ["CONTENT_LENGTH"])
    stream = io.BytesIO(body) if isinstance(body, bytes) else body
    spool = Spool(folder, wanted_digests(environ))
    try:
        read_body({**environ, "wsgi.input": stream, "CONTENT_LENGTH": str(size)}, spool, signer)
        return stored(spool, folder)
    except BodyError as error:
        return error.code if not re.search("[0-9a-f]{40}", error.message) else f"a secret: {error.message}"
    finally:
        spool.discard()


@pytest.mark.parametrize("kind", UPLOADS)
def test_the_documented_chunks(kind: str, tmp_path: Path) -> None:
    environ, body = upload(kind)

    def outcome(body: bytes) -> bytes | str:
        signer = believe(environ, AWS_NOW, AWS_ACCESS, AWS_SECRET).chunk_signer
        assert signer is not None
        assert signer.trailer == kind.endswith("-TRAILER")
        return read(environ, body, signer, tmp_path)

    assert outcome(body) == b"a" * 66560
    _, _, signatures, _ = UPLOADS[kind]
    for signature in signatures:
        assert outcome(body.replace(signature.encode(), b"0" * 64)) == "SignatureDoesNotMatch"
        assert outcome(body.replace(f";chunk-signature={signature}".encode(), b"")) == "SignatureDoesNotMatch"
    for place in (100, 60_000, 66_000):
        assert outcome(body[:place] + b"b" + body[place + 1 :]) == "SignatureDoesNotMatch"
    first, second = body.index(b"400;"), body.index(b"0;chunk", 66_000)
    assert outcome(body[first:second] + body[:first] + body[second:]) == "SignatureDoesNotMatch"
    assert outcome(body[:first] + body[second:]) == "SignatureDoesNotMatch"
    assert outcome(body[:second]) == "IncompleteBody"
    assert outcome(body[:-2] + b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n") == "SignatureDoesNotMatch"
    assert read(environ, body, None, tmp_path) == "SignatureDoesNotMatch"
    if kind.endswith("-TRAILER"):
        assert outcome(body[:-2]) == b"a" * 66560  # some clients leave out the last empty line
        assert outcome(body.replace(b"sOO8", b"sOO9")) == "SignatureDoesNotMatch"
        assert outcome(body.replace(b":d81f", b":d81e")) == "SignatureDoesNotMatch"
        assert outcome(re.sub(rb"x-amz-trailer-signature:\w+\r\n", b"", body)) == "SignatureDoesNotMatch"
        assert outcome(re.sub(rb"x-amz-checksum-crc32c:.*\r\n", b"", body)) == "SignatureDoesNotMatch"


def test_a_made_upload_in_signed_chunks(tmp_path: Path) -> None:
    """Several trailing headers, sizes that fall on no boundary, and a checksum that is held against the bytes."""
    moment = signed_at(datetime.now(UTC))
    scope = f"{moment[:8]}/us-east-1/s3/aws4_request"
    chunks = [bytes([number]) * size for number, size in enumerate([1, 300_000, 8192, 7, 65_536])] + [b""]
    data = b"".join(chunks)
    fields = {
        "content-encoding": "aws-chunked",
        "host": "127.0.0.1:1",
        "x-amz-content-sha256": f"{SIGNED}-TRAILER",
        "x-amz-date": moment,
        "x-amz-decoded-content-length": str(len(data)),
        "x-amz-trailer": "x-amz-checksum-sha256",
    }
    lines = "".join(f"{name}:{value}\n" for name, value in fields.items())
    seed = sign_v4(f"PUT\n/b/k\n\n{lines}\n{';'.join(fields)}\n{SIGNED}-TRAILER", moment, scope)
    claim = f"Credential={ACCESS}/{scope},SignedHeaders={';'.join(fields)},Signature={seed}"
    environ = hand_made("PUT", "/b/k", {**fields, "authorization": f"AWS4-HMAC-SHA256 {claim}"})

    def encode(digest: str) -> bytes:
        body, previous = b"", seed
        for chunk in chunks:
            text = [f"AWS4-HMAC-SHA256-PAYLOAD\n{moment}", scope, previous, EMPTY, hashlib.sha256(chunk).hexdigest()]
            previous = sign_text("\n".join(text), scope)
            body += f"{len(chunk):x};chunk-signature={previous}\r\n".encode() + chunk + (b"\r\n" if chunk else b"")
        trailer = hashlib.sha256(f"x-amz-checksum-sha256:{digest}\nx-amz-meta-z:1\n".encode()).hexdigest()
        last = sign_text(f"AWS4-HMAC-SHA256-TRAILER\n{moment}\n{scope}\n{previous}\n{trailer}", scope)
        return body + (
            f"X-Amz-Meta-Z: 1\r\nx-amz-checksum-sha256: {digest}\r\nx-amz-trailer-signature:{last}\r\n\r\n".encode()
        )

    def outcome(body: bytes) -> bytes | str:
        spool = Spool(tmp_path, digests=("md5", "sha256"))
        try:
            sent = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            read_body(sent, spool, believe(environ).chunk_signer)
            return stored(spool, tmp_path)
        except BodyError as error:
            return error.code
        finally:
            spool.discard()

    assert outcome(encode(base64.b64encode(hashlib.sha256(data).digest()).decode())) == data
    assert outcome(encode(base64.b64encode(hashlib.sha256(b"").digest()).decode())) == "BadDigest"


@pytest.mark.parametrize("body", [b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc", b"-1\r\n", b"x\r\n", b"", b"3\r\nabc\r\n"])
def test_broken_chunks(body: bytes, tmp_path: Path) -> None:
    environ = {
        "HTTP_X_AMZ_CONTENT_SHA256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "HTTP_X_AMZ_DECODED_CONTENT_LENGTH": "3",
    }
    assert read(environ, body, None, tmp_path) == "IncompleteBody"
    assert read(environ, b"3\r\nabc\r\n0\r\n\r\n", None, tmp_path) == b"abc"


class Endless(io.RawIOBase):
    """A body that is made while it is read."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts, self.rest = parts, b""

    def read(self, size: int = -1) -> bytes:
        while len(self.rest) < size and (part := next(self.parts, b"")):
            self.rest += part
        found, self.rest = self.rest[:size], self.rest[size:]
        return found


def test_reading_takes_little_memory(tmp_path: Path) -> None:
    environ = {
        "HTTP_X_AMZ_CONTENT_SHA256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "HTTP_X_AMZ_DECODED_CONTENT_LENGTH": str(1 << 40),
        "CONTENT_LENGTH": str(1 << 40),
    }
    huge = [f"{32 << 20:x}\r\n".encode(), *[b"a" * (1 << 16)] * 512, b"\r\n"]
    trailers = (f"x-amz-checksum-{number}:1\r\n".encode() for number in range(1 << 40))
    line = iter(lambda: b"a" * (1 << 16), b"")
    tracemalloc.start()
    try:
        assert read(environ, Endless(iter([*huge, b"x"])), None, tmp_path) == "IncompleteBody"
        assert read(environ, Endless(line), None, tmp_path) == "IncompleteBody"
        assert (
            read(environ, Endless(iter([b"0\r\n", b"a:1\r\na:2\r\n\r\n"])), None, tmp_path) == "MalformedTrailerError"
        )

        def body() -> Iterator[bytes]:
            yield b"0\r\n"
            yield from trailers

        assert read(environ, Endless(body()), None, tmp_path) == "MalformedTrailerError"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# Forms


def form(catcher: Catcher, signature: str, conditions: list[Any], fields: dict[str, str]) -> dict[str, str]:
    client = catcher.client(signature=signature)
    made = client.generate_presigned_post(BUCKET, "in/${filename}", dict(fields), conditions, 60)
    return {**made["fields"], "key": "in/a.txt"}


def form_refusal(fields: dict[str, str], now: datetime | None = None, secret: str = SECRET) -> tuple[str, str]:
    with pytest.raises(SignatureError) as error:
        check_form(fields.items(), BUCKET, ACCESS, secret, now or datetime.now(UTC))
    assert SECRET not in error.value.message
    assert not re.search(r"[0-9a-f]{40}|[A-Za-z0-9+/]{27}=", error.value.message)
    return error.value.code, error.value.message.rpartition(": ")[2]


@pytest.mark.parametrize("signature", ["s3v4", "s3"])
def test_forms_that_boto3_makes(catcher: Catcher, signature: str) -> None:
    conditions = [["content-length-range", 1, 100], ["starts-with", "$Content-Type", "text/"], {"acl": "private"}]
    good = form(catcher, signature, conditions, {}) | {"acl": "private", "content-type": "text/x", "x-ignore-a": "b"}
    for bucket in ({}, {"bucket": BUCKET}):
        assert check_form({**good, **bucket}.items(), BUCKET, ACCESS, SECRET, datetime.now(UTC)) == range(1, 101)
    place = "x-amz-signature" if signature == "s3v4" else "signature"
    assert form_refusal(good, secret="another")[0] == "SignatureDoesNotMatch"
    assert form_refusal({**good, place: good[place][::-1]})[0] == "SignatureDoesNotMatch"
    policy = json.loads(base64.b64decode(good["policy"]))
    policy["conditions"][0] = ["content-length-range", 1, 1 << 30]
    other = base64.b64encode(json.dumps(policy).encode()).decode()
    assert form_refusal({**good, "policy": other})[0] == "SignatureDoesNotMatch"
    assert form_refusal(good, datetime.now(UTC) + timedelta(seconds=62)) == ("AccessDenied", "Policy expired.")
    assert form_refusal({**good, "bucket": "other"}) == ("AccessDenied", "bucket")
    assert form_refusal({**good, "key": "out/a.txt"}) == ("AccessDenied", "key")
    assert form_refusal({**good, "acl": "public-read"}) == ("AccessDenied", "acl")
    assert form_refusal({**good, "content-type": "image/x"}) == ("AccessDenied", "content-type")
    assert form_refusal({**good, "Content-Type": "text/x"}) == ("InvalidArgument", "content-type")
    assert form_refusal({**good, "KEY": "in/b"}) == ("InvalidArgument", "key")
    assert form_refusal({**good, "FILE": "x"}) == ("InvalidArgument", "file")
    assert form_refusal({**good, "x-amz-meta-a": "b"}) == ("AccessDenied", "x-amz-meta-a")
    assert form_refusal({name: value for name, value in good.items() if name != place})[0] == "AccessDenied"
    assert form_refusal({name: value for name, value in good.items() if name != "policy"})[0] == "AccessDenied"
    name = "x-amz-credential" if signature == "s3v4" else "AWSAccessKeyId"
    assert form_refusal({**good, name: good[name].replace(ACCESS, "OTHER")})[0] == "InvalidAccessKeyId"
    if signature == "s3v4":
        for name, value in {"x-amz-date": "", "x-amz-algorithm": "x", "x-amz-credential": ACCESS}.items():
            assert form_refusal({**good, name: value})[0] == "InvalidArgument"
        elsewhere = good["x-amz-credential"].replace("/s3/", "/sqs/")
        moved = {**good, "x-amz-credential": elsewhere}
        moved["x-amz-signature"] = sign_text(good["policy"], elsewhere.partition("/")[2])
        assert form_refusal(moved)[0] == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "policy",
    [
        "x",
        [],
        {},
        {"expiration": 7, "conditions": []},
        {"expiration": "2999-01-01", "conditions": 7},
        *(
            {"expiration": "2999-01-01", "conditions": [condition]}
            for condition in ([], [1, 2, 3], ["eq", "a", "b"], 7)
        ),
        {"expiration": "2999-01-01", "conditions": [["content-length-range", "x", 1]]},
    ],
)
def test_signed_policies_that_are_none(policy: object) -> None:
    text = base64.b64encode(json.dumps(policy).encode()).decode() if policy != "x" else "x"
    signature = base64.b64encode(hmac.digest(SECRET.encode(), text.encode(), "sha1")).decode()
    assert (
        form_refusal({"key": "k", "policy": text, "AWSAccessKeyId": ACCESS, "signature": signature})[0]
        == "InvalidPolicyDocument"
    )
