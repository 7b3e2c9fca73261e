"""What a 200 answer promises: the object is there, whole, after any kill; and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.stack.conftest import Server

BUCKET = "dropforge"

HOSTILE_KEYS = [
    "../../../etc/passwd",
    "a/../b",
    "./a",
    "a//b",
    "folder/",
    "nul-%00-percent",
    "plus+and space",
    "quote'\"<&>",
    "ünïcödé/日本語/🦊",
    "question?mark#hash",
    "C:\\windows",
    "x" * 1024,
    "con.1",
    "-rf",
]


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def listing(client: Any, bucket: str = BUCKET) -> list[tuple[str, int, str, Any]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": 7})
    return [
        (item["Key"], item["Size"], item["ETag"], item["LastModified"])
        for page in pages
        for item in page.get("Contents", [])
    ]


def bodies(server: Server) -> list[Path]:
    """The files of large bodies."""
    return list((server.state / "objects" / "bodies").iterdir())


def test_hostile_keys_come_back_and_stay_in_the_folder(server: Server) -> None:
    client = server.client()
    for key in HOSTILE_KEYS:
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode() * 3)
    for path in server.state.rglob("*"):
        assert path.resolve().is_relative_to(server.state.resolve())
    client = server.restart().client()
    assert [item[0] for item in listing(client)] == sorted(HOSTILE_KEYS)
    for key in HOSTILE_KEYS:
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == key.encode() * 3
        client.delete_object(Bucket=BUCKET, Key=key)
    assert listing(client) == []


def test_keys_that_s3_refuses(server: Server) -> None:
    with pytest.raises(ClientError) as error:
        server.client().put_object(Bucket=BUCKET, Key="x" * 1025, Body=b"")
    assert code(error) == "KeyTooLongError"
    status, text = server.put(f"/{BUCKET}/%FF%FE", b"x")
    assert (status, "InvalidURI" in text) == (400, True)


def test_restart_keeps_everything_that_is_known_of_an_object(server: Server) -> None:
    client = server.client()
    body = os.urandom(3000)
    client.put_object(
        Bucket=BUCKET,
        Key="a",
        Body=body,
        ContentType="text/x-thing",
        ContentEncoding="gzip",
        CacheControl="no-store",
        Metadata={"my_key": "v 1", "other-key": "x"},
        ChecksumAlgorithm="SHA256",
    )
    before = client.head_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")
    client = server.restart().client()
    after = client.head_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")
    assert after["ChecksumSHA256"] == base64.b64encode(hashlib.sha256(body).digest()).decode()
    assert after["Metadata"] == {"my_key": "v 1", "other-key": "x"}
    assert after["ContentType"] == "text/x-thing"
    for answer in (before, after):
        del answer["ResponseMetadata"]
    assert before == after
    assert client.get_object(Bucket=BUCKET, Key="a", Range="bytes=10-19")["Body"].read() == body[10:20]


def test_multipart_keeps_its_tag_and_composite_checksum(server: Server, tmp_path: Any) -> None:
    client = server.restart().client()
    body = os.urandom(11 << 20)
    (tmp_path / "big").write_bytes(body)
    client.upload_file(str(tmp_path / "big"), BUCKET, "big", ExtraArgs={"Metadata": {"k": "v"}})
    parts = [body[start : start + (8 << 20)] for start in range(0, len(body), 8 << 20)]
    tag = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
    for _ in range(2):
        found = client.get_object(Bucket=BUCKET, Key="big", ChecksumMode="ENABLED")
        assert found["ETag"] == f'"{tag}-2"'
        assert found["ChecksumCRC32"].endswith("-2")
        assert found["Metadata"] == {"k": "v"}
        assert found["Body"].read() == body
        client = server.restart().client()
    assert len(bodies(server)) == 2


def test_completing_an_upload_twice_is_no_error(server: Server) -> None:
    client = server.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="u")["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key="u", UploadId=upload, PartNumber=1, Body=b"abc")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    first = client.complete_multipart_upload(Bucket=BUCKET, Key="u", UploadId=upload, MultipartUpload=parts)
    client = server.restart().client()
    again = client.complete_multipart_upload(Bucket=BUCKET, Key="u", UploadId=upload, MultipartUpload=parts)
    assert first["ETag"] == again["ETag"]


def test_an_upload_goes_on_after_a_kill(server: Server) -> None:
    client = server.client()
    first, second = os.urandom(6 << 20), os.urandom(1000)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="u", Metadata={"k": "v"})["UploadId"]
    of_upload = {"Bucket": BUCKET, "Key": "u", "UploadId": upload}
    tags = [client.upload_part(**of_upload, PartNumber=1, Body=first)["ETag"]]
    client = server.restart().client()
    tags.append(client.upload_part(**of_upload, PartNumber=2, Body=second)["ETag"])
    client = server.restart().client()
    assert [part["ETag"] for part in client.list_parts(**of_upload)["Parts"]] == tags
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(**of_upload, MultipartUpload={"Parts": parts})
    client = server.restart().client()
    found = client.get_object(Bucket=BUCKET, Key="u")
    assert found["Body"].read() == first + second
    assert found["Metadata"] == {"k": "v"}
    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []
    with pytest.raises(client.exceptions.NoSuchUpload):
        client.upload_part(**of_upload, PartNumber=3, Body=b"late")


def test_an_upload_that_is_given_up_leaves_no_bytes(server: Server) -> None:
    client = server.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="u")["UploadId"]
    for _ in range(2):  # the second takes the first one's place
        client.upload_part(Bucket=BUCKET, Key="u", UploadId=upload, PartNumber=1, Body=os.urandom(100_000))
    assert len(bodies(server)) == 1
    client.abort_multipart_upload(Bucket=BUCKET, Key="u", UploadId=upload)
    assert bodies(server) == []


OLDER = """
import sys
from datetime import timedelta
from pathlib import Path
from dropforge.stack.moto_objects import install
from dropforge.stack.persistence import Persistence, s3
install()
store = Persistence(Path(sys.argv[1]))
store.load()
upload = s3().buckets["dropforge"].multiparts[sys.argv[2]]
for part in upload.parts.values():
    part.last_modified -= timedelta(days=8)
store._uploads.clear()
with store.commit():
    store.save_upload("dropforge", sys.argv[2])
"""


def test_an_upload_that_nobody_went_on_with_for_a_week_is_ended_at_the_next_start(server: Server) -> None:
    client = server.client()
    ids = []
    for _ in range(2):
        ids.append(client.create_multipart_upload(Bucket=BUCKET, Key="u")["UploadId"])
        client.upload_part(Bucket=BUCKET, Key="u", UploadId=ids[-1], PartNumber=1, Body=os.urandom(100_000))
    server.kill()
    subprocess.run([sys.executable, "-c", OLDER, str(server.state / "objects"), ids[0]], check=True)
    client = server.start().client()
    assert [one["UploadId"] for one in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == ids[1:]
    assert len(bodies(server)) == 1
    client.abort_multipart_upload(Bucket=BUCKET, Key="u", UploadId=ids[1])


def test_copy_and_deletes_survive(server: Server) -> None:
    client = server.client()
    for key in ("a", "b", "c", "d"):
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode(), Metadata={"from": key})
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": "a"})
    client.delete_object(Bucket=BUCKET, Key="b")
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "c"}, {"Key": "never there"}]})
    client.put_object(Bucket=BUCKET, Key="d", Body=b"new")
    client = server.restart().client()
    assert [item[0] for item in listing(client)] == ["a", "copy", "d"]
    copied = client.get_object(Bucket=BUCKET, Key="copy")
    assert (copied["Body"].read(), copied["Metadata"]) == (b"a", {"from": "a"})
    assert client.get_object(Bucket=BUCKET, Key="d")["Body"].read() == b"new"


def test_half_a_body_is_no_object(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="half", Body=b"old")
    signed = client.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "half"})
    path = signed.removeprefix(server.url)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 400)
        connection.shutdown(socket.SHUT_WR)
        assert b"IncompleteBody" in connection.makefile("rb").read()
    assert client.get_object(Bucket=BUCKET, Key="half")["Body"].read() == b"old"
    # The same, killed in the middle.
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.replace(": 1000", ": 1000000").encode() + b"x" * 400_000)
        while not bodies(server):
            time.sleep(0.01)
        server.kill()
    client = server.start().client()
    assert client.get_object(Bucket=BUCKET, Key="half")["Body"].read() == b"old"
    assert bodies(server) == []


WRONG = {
    "Content-MD5": base64.b64encode(bytes(16)).decode(),
    "x-amz-checksum-sha256": base64.b64encode(bytes(32)).decode(),
    "x-amz-checksum-crc32": base64.b64encode(bytes(4)).decode(),
    "x-amz-content-sha256": "0" * 64,
}


@pytest.mark.parametrize("header", WRONG)
def test_bytes_that_changed_on_the_way_are_refused(server: Server, header: str) -> None:
    status, text = server.put(f"/{BUCKET}/k", b"body", {header: WRONG[header]})
    assert (status, "BadDigest" in text or "Mismatch" in text) == (400, True)
    assert listing(server.client()) == []


def test_streamed_uploads_with_a_trailing_checksum(server: Server) -> None:
    body = os.urandom(70_000)
    chunks = [body[:65_536], body[65_536:], b""]
    encoded = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks[:-1])
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    encoded += b"0\r\n" + f"x-amz-checksum-sha256:{digest}\r\n\r\n".encode()
    headers = {
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": str(len(body)),
        "x-amz-trailer": "x-amz-checksum-sha256",
        "Content-Encoding": "aws-chunked",
    }
    for data, status in ((encoded, 200), (encoded.replace(digest.encode(), digest[::-1].encode()), 400)):
        assert server.put(f"/{BUCKET}/s", data, headers)[0] == status
    found = server.client().get_object(Bucket=BUCKET, Key="s", ChecksumMode="ENABLED")
    assert found["Body"].read() == body
    assert found["ChecksumSHA256"] == digest
    assert "ContentEncoding" not in found


def test_kills_under_load_lose_nothing_that_was_acknowledged(server: Server) -> None:
    """Writers overwrite, delete and upload in parts while the server is killed again and again."""
    acknowledged: dict[str, bytes | None] = {}
    tried: dict[str, set[bytes | None]] = {}
    stop = threading.Event()

    def write(worker: int) -> None:
        chance = random.Random(worker)
        client = server.client()
        number = 0
        while not stop.is_set():
            number += 1
            key = f"{worker}/{number % 5}"
            body: bytes | None = chance.randbytes(chance.choice([0, 10, 5000, 300_000]))
            kind = chance.choice(["put", "put", "parts", "delete"])
            if kind == "delete":
                body = None
            tried.setdefault(key, {acknowledged.get(key)}).add(body)
            try:
                if kind == "delete":
                    client.delete_object(Bucket=BUCKET, Key=key)
                elif kind == "put":
                    client.put_object(Bucket=BUCKET, Key=key, Body=body)
                else:
                    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
                    part = client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=body)
                    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
                    client.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload=parts)
            except (BotoCoreError, ClientError, OSError, KeyError):
                return  # killed, perhaps in mid-answer: this write is in doubt, and the round is over
            acknowledged[key] = body
            tried[key] = {body}

    for round_ in range(3):
        stop.clear()
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(write, worker) for worker in range(4)]
            deadline = time.monotonic() + 20
            while len(tried) < 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(random.Random(round_).random() * 0.3)
            server.kill()
            stop.set()
            for one in done:
                one.result()
        client = server.start().client()
        found = {item[0] for item in listing(client)}
        for key, possible in tried.items():
            body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read() if key in found else None
            assert body in possible, f"{key}: lost or half-written"
            acknowledged[key] = body
            tried[key] = {body}
        assert found <= set(tried)


def test_reading_while_replacing_gives_whole_objects(server: Server) -> None:
    bodies = [bytes([number]) * 200_000 for number in range(4)]
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=bodies[0])
    stop = threading.Event()

    def replace() -> None:
        mine = server.client()
        while not stop.is_set():
            for body in bodies:
                mine.put_object(Bucket=BUCKET, Key="k", Body=body)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(replace)
        for _ in range(150):
            answer = client.get_object(Bucket=BUCKET, Key="k")
            body = answer["Body"].read()
            assert body in bodies
            assert hashlib.md5(body).hexdigest() == answer["ETag"].strip('"')
        stop.set()
        writing.result()


def test_buckets_survive_too(server: Server) -> None:
    client = server.client()
    client.create_bucket(Bucket="another")
    client.create_bucket(Bucket="short-lived")
    client.put_object(Bucket="another", Key="k", Body=b"v")
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(ClientError) as error:
        client.delete_bucket(Bucket="another")
    assert code(error) == "BucketNotEmpty"
    with pytest.raises(ClientError):
        client.delete_bucket(Bucket=BUCKET)
    client = server.restart().client()
    assert {bucket["Name"] for bucket in client.list_buckets()["Buckets"]} == {"another", BUCKET}
    assert client.get_object(Bucket="another", Key="k")["Body"].read() == b"v"


def test_only_who_has_both_keys_gets_in(server: Server) -> None:
    for wrong, answer in (
        ({"access_key": "DFSOMEONEELSE"}, "InvalidAccessKeyId"),
        ({"secret_key": "somebody-elses"}, "SignatureDoesNotMatch"),
    ):
        with pytest.raises(ClientError) as error:
            server.client(**wrong).list_buckets()
        assert code(error) == answer
        with pytest.raises(ClientError) as error:
            server.client("sqs", **wrong).list_queues()
        assert code(error) == answer
    for path, host in (
        ("/dropforge?list-type=2", "127.0.0.1"),
        ("/moto-api/reset", "127.0.0.1"),
        ("/", "evil.example"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", path, headers={"Host": host})
        assert connection.getresponse().status == 403


def test_a_link_ends(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"v")
    link = client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "k"}, ExpiresIn=1)
    with urllib.request.urlopen(link) as answer:
        assert answer.read() == b"v"

    def ended() -> bool:
        try:
            urllib.request.urlopen(link).close()
        except urllib.error.HTTPError as error:
            return error.code == 403
        return False

    deadline = time.monotonic() + 20
    while not ended():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_what_a_signed_document_says_cannot_be_changed(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"v")

    def change(request: Any, **_: object) -> None:
        assert b"other" in request.body
        request.body = request.body.replace(b"other", b"k////")
        request.headers.pop("Content-MD5", None)

    client.meta.events.register("before-send.s3.DeleteObjects", change)
    with pytest.raises(ClientError) as error:
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "other"}]})
    assert code(error) == "XAmzContentSHA256Mismatch"
    assert [item[0] for item in listing(server.client())] == ["k"]


def test_keys_of_the_environment_take_the_place_of_the_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_S3_ACCESS_KEY", "DFTOLD")
    alone = subprocess.run(
        [sys.executable, "-m", "dropforge.stack.objects", "--state", str(tmp_path), "--port", "1"],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 1
    assert "DROPFORGE_S3_SECRET_KEY: is not set" in alone.stderr
    monkeypatch.setenv("DROPFORGE_S3_SECRET_KEY", "told")
    server = Server(tmp_path).start()
    try:
        server.client(access_key="DFTOLD", secret_key="told").list_objects_v2(Bucket="dropforge")
        with pytest.raises(ClientError):
            server.client().list_objects_v2(Bucket="dropforge")
    finally:
        server.kill()


def test_two_servers_do_not_share_a_folder(server: Server) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "dropforge.stack.objects", "--state", str(server.state), "--port", "1"],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1
    assert "End the other server" in second.stderr
    assert "Traceback" not in second.stderr


def test_memory_does_not_hold_the_objects(server: Server) -> None:
    def resident() -> int:
        assert server.process is not None
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    client = server.client()
    body = os.urandom(8 << 20)
    client.put_object(Bucket=BUCKET, Key="warm", Body=body)
    client.get_object(Bucket=BUCKET, Key="warm")["Body"].read()
    before = resident()
    for number in range(8):
        client.put_object(Bucket=BUCKET, Key=str(number), Body=body)
        assert client.get_object(Bucket=BUCKET, Key=str(number))["Body"].read() == body
    assert resident() - before < 16 << 10
