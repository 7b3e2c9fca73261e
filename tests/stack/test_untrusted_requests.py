"""Requests that nobody signed, or that whoever holds a link makes wrong: they are refused and cost little."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import logging
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dropforge.stack import connections, control
from dropforge.stack.bodies import Spool
from dropforge.stack.body import BodyError, RequestTimeoutError, read_body
from dropforge.stack.documents import check_document
from dropforge.stack.request_log import FewLines
from dropforge.stack.services import LOCAL
from dropforge.stack.supervisor import port_trouble
from tests.stack.clients.checksums import KINDS, checksum
from tests.stack.conftest import Server
from tests.stack.test_objects import BUCKET, bodies, listing
from tests.stack.test_supervisor import until

FORM = "Content-Type: multipart/form-data; boundary=x"
BROKEN_TRANSFERS = [
    b"FFFFFFFFFFFF\r\nabc",
    b"FFFFFFFFFF\r\nabc",
    b"3\r\nabcd\r\n0\r\n\r\n",
    b"-1\r\nabc",
    b"",
    b"3\r\nabc\r\n",
]


def ask(server: Server, head: str, body: bytes = b"") -> tuple[int, str]:
    """Send a request as it is and end there; the answer's status and text."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        first, *more = head.splitlines()
        lines = [f"{first} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *more, "", ""]
        connection.sendall("\r\n".join(lines).encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read().decode()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("body", BROKEN_TRANSFERS)
def test_a_transfer_in_chunks_without_a_length_is_refused(server: Server, body: bytes) -> None:
    link = server.client().generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "k"})
    for line in (f"POST /{BUCKET}\n{FORM}", f"PUT {link.removeprefix(server.url)}"):
        status, text = ask(server, f"{line}\nTransfer-Encoding: chunked", body)
        assert (status, "MissingContentLength" in text) == (411, True)
    assert server.process is not None
    assert server.process.poll() is None
    assert listing(server.client()) == []


def test_a_transfer_in_chunks_with_a_length_is_read(server: Server) -> None:
    headers = {"Transfer-Encoding": "chunked", "x-amz-decoded-content-length": "70000"}
    whole = b"11170;a=b\r\n" + b"x" * 70_000 + b"\r\n0\r\n\r\n"
    assert server.put(f"/{BUCKET}/k", whole, headers)[0] == 200
    assert server.client().get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"x" * 70_000
    for body in (*BROKEN_TRANSFERS[2:4], whole.replace(b"11170;", b"11171;"), b"11170\r\n" + whole):
        status, text = server.put(f"/{BUCKET}/broken", body, headers)
        assert (status, "IncompleteBody" in text) == (400, True)
    status, text = server.put(f"/{BUCKET}/broken", whole, {**headers, "x-amz-decoded-content-length": "-1"})
    assert (status, "InvalidRequest" in text) == (400, True)
    assert [item[0] for item in listing(server.client())] == ["k"]
    assert len(bodies(server)) == 1


@pytest.mark.parametrize("body", [*BROKEN_TRANSFERS, b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 5000 + b"\r\n"])
def test_broken_transfers_in_chunks(body: bytes, tmp_path: Path) -> None:
    head = {"HTTP_TRANSFER_ENCODING": "chunked", "HTTP_X_AMZ_DECODED_CONTENT_LENGTH": "3"}

    def read(body: bytes) -> bytearray | None:
        spool = Spool(tmp_path)
        read_body({**head, "wsgi.input": io.BytesIO(body)}, spool)
        return spool.small

    assert read(b"2\r\nab\r\n1\r\nc\r\n0\r\na: b\r\n\r\n") == b"abc"
    with pytest.raises(BodyError) as error:
        read(body)
    assert error.value.code == "IncompleteBody"


def test_more_than_was_promised_is_not_stored(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    body = io.BytesIO(b"1000000\r\n" + b"x" * (16 << 20))
    head = {"HTTP_TRANSFER_ENCODING": "chunked", "HTTP_X_AMZ_DECODED_CONTENT_LENGTH": "10"}
    with pytest.raises(BodyError):
        read_body({**head, "wsgi.input": body}, spool)
    spool.discard()
    assert spool.size <= 1 << 20


def multipart(fields: list[tuple[str, str]], content: bytes = b"x") -> bytes:
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields]
    file = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return "".join([*parts, file]).encode() + content + b"\r\n--x--\r\n"


def upload_form(server: Server, body: bytes) -> tuple[int, str]:
    return ask(server, f"POST /{BUCKET}\n{FORM}\nContent-Length: {len(body)}", body)


def policy(server: Server) -> list[tuple[str, str]]:
    """The fields of a form that may upload below user/, but for the key."""
    conditions = [["starts-with", "$key", "user/"]]
    made = server.client().generate_presigned_post(BUCKET, "user/${filename}", Conditions=conditions)
    return [(name, value) for name, value in made["fields"].items() if name != "key"]


def test_a_form_cannot_name_a_key_that_its_policy_does_not_see(server: Server) -> None:
    rest = policy(server)
    good, bad = "user/ok", "ledger/bad"
    for fields in (
        [("key", bad), *rest, ("KEY", good)],
        [("KEY", good), *rest, ("key", bad)],
        [("key", good), *rest, ("key", bad)],
        [("key", bad), *rest, ("key", good)],
        [("KEY", good), *rest],
        rest,
    ):
        status, text = upload_form(server, multipart(fields))
        assert (status, "InvalidArgument" in text) == (400, True), text
    assert upload_form(server, multipart([("key", bad), *rest]))[0] == 403
    assert upload_form(server, multipart([("key", good), *rest, ("bucket", "another")]))[0] == 403
    assert listing(server.client()) == []
    assert upload_form(server, multipart([("key", good), *rest, ("bucket", BUCKET)]))[0] == 204
    assert [item[0] for item in listing(server.client())] == [good]


def named(server: Server, key: str, file: str = "a", **more: str) -> tuple[int, str]:
    """Upload a form whose policy allows every key and the fields in `more`."""
    conditions = [["starts-with", "$key", ""], *(["starts-with", f"${name}", ""] for name in more)]
    made = server.client().generate_presigned_post(BUCKET, key, Conditions=conditions)
    body = multipart([*made["fields"].items(), *more.items()])
    return upload_form(server, body.replace(b'filename="a"', f'filename="{file}"'.encode()))


def test_a_form_s_key_has_the_bounds_of_keys(server: Server) -> None:
    for key, file, code in (
        ("", "a", "InvalidArgument"),
        ("${filename}", "b/", "InvalidArgument"),
        ("x" * 1025, "a", "KeyTooLongError"),
        ("ü" * 513, "a", "KeyTooLongError"),
        ("x/${filename}", "y" * 1023, "KeyTooLongError"),
    ):
        status, text = named(server, key, file)
        assert (status, code in text) == (400, True), (key, text)
    assert named(server, "x/${filename}", "b/" + "y" * 1022)[0] == 204
    assert [item[0] for item in listing(server.client())] == ["x/" + "y" * 1022]


def test_a_form_asks_for_an_answer_that_s3_gives(server: Server) -> None:
    for told in ("abc", "999999", "500", "", "0200"):
        status, text = named(server, "k", success_action_status=told)
        assert (status, "InvalidArgument" in text) == (400, True), text
    assert listing(server.client()) == []
    for told in ("200", "201", "204"):
        assert named(server, "k", success_action_status=told)[0] == int(told)
    assert "Traceback" not in (server.state / "objects.log").read_text()


def test_a_large_form_arrives_whole(server: Server) -> None:
    rest = policy(server)
    overhead = len(multipart([("key", "user/a"), *rest], b""))
    # Of these sizes the first bytes that are looked at end before, in and after the boundary behind the file.
    sizes = [(64 << 10) - overhead + more for more in range(16)]
    for size in (0, *sizes, 1 << 20):
        content = bytes(number % 251 for number in range(size))
        assert upload_form(server, multipart([("key", "user/a"), *rest], content))[0] == 204
        assert server.client().get_object(Bucket=BUCKET, Key="user/a")["Body"].read() == content
    body = multipart([("key", "user/b"), *rest], b"x" * (1 << 20))
    late = body[:-7] + b'--x\r\nContent-Disposition: form-data; name="KEY"\r\n\r\nuser/c\r\n--x--\r\n'
    status, text = upload_form(server, late)
    assert (status, "InvalidArgument" in text) == (400, True)
    assert [item[0] for item in listing(server.client())] == ["user/a"]


def test_a_large_form_lies_in_the_state_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    server = Server(tmp_path / "state").start()
    try:
        form = multipart([*policy(server), ("key", "user/a")], b"a" * 700_000)
        assert upload_form(server, form)[0] == 204
        elsewhere.rmdir()  # a folder is chosen once
        assert upload_form(server, form)[0] == 204
    finally:
        server.kill()


def test_a_form_is_held_when_its_policy_allows_it(server: Server) -> None:
    """What nobody signed is refused while most of it has not come."""
    forms = [
        (multipart([("key", "k"), ("policy", "x")], b""), 403),
        (multipart([("key", "k"), ("x-ignore-a", "x" * (64 << 10))], b""), 400),
        (b"x", 400),
        (b"--x\r\nnonsense\r\n\r\n", 400),
    ]
    for start, status in forms:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = f"POST /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{FORM}\r\n"
            connection.sendall(
                f"{head}Content-Length: {16 << 20}\r\n\r\n".encode() + start.ljust(1 << 16, b"x")[: 1 << 16]
            )
            assert int(connection.makefile("rb").readline().split()[1]) == status


def test_a_head_is_bounded(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        # The last line goes beyond the bound, and nothing is left unread, which would reset the connection.
        lines = [f"x-{number}: {'x' * 4000}\r\n" for number in range(17)]
        connection.sendall(f"GET /{BUCKET} HTTP/1.1\r\n{''.join(lines)}".encode())
        assert int(connection.makefile("rb").readline().split()[1]) == 431


@pytest.mark.parametrize("line", [b"x" * 60_000 + b" a", b"x" * 60_000, b"x" * 66_000, b"GET / HTTP/" + b"9" * 60_000])
def test_what_a_client_sends_fills_no_log(server: Server, line: bytes) -> None:
    log = server.state / "objects.log"
    before = log.stat().st_size
    for _ in range(3):
        # A line that is not read to its end resets the connection.
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(60)
            connection.sendall(line + b"\r\n\r\n")
            connection.makefile("rb").read()
    assert log.stat().st_size - before < 2000


def test_what_nobody_signed_leaves_no_line_in_a_bucket_s_access_log(server: Server) -> None:
    s3 = server.client("s3")
    for bucket in ("watched", "lines"):
        s3.create_bucket(Bucket=bucket)
    everybody = "uri=http://acs.amazonaws.com/groups/s3/LogDelivery"
    s3.put_bucket_acl(Bucket="lines", GrantWrite=everybody, GrantReadACP=everybody)
    told = {"LoggingEnabled": {"TargetBucket": "lines", "TargetPrefix": ""}}
    s3.put_bucket_logging(Bucket="watched", BucketLoggingStatus=told)
    for key in ("", "/a"):
        ask(server, f"OPTIONS /watched{key}\nOrigin: http://other\nAccess-Control-Request-Method: PUT")
    assert not s3.list_objects_v2(Bucket="lines")["KeyCount"]
    s3.list_objects_v2(Bucket="watched")
    assert s3.list_objects_v2(Bucket="lines")["KeyCount"] == 1


def test_lines_about_requests_are_few(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    log = logging.getLogger("tests.requests")
    few = FewLines(lambda: now)
    log.addFilter(few)
    try:
        for _ in range(250):
            log.warning("%s\r\n\x1b[2J", "x" * 60_000)
        log.error("of another kind")
        assert len(caplog.messages) == 101
        assert max(map(len, caplog.messages)) < 300
        assert all(message.isprintable() for message in caplog.messages)
        now = 1061.0
        log.warning("short")
        log.warning("again")
        assert caplog.messages[100:] == [
            "of another kind",
            "short (150 more lines like this were left out)",
            "again",
        ]
    finally:
        log.removeFilter(few)


def test_what_nobody_signed_is_a_line_that_is_counted(server: Server) -> None:
    log = server.state / "objects.log"
    before = log.stat().st_size
    unread = f"OPTIONS /{BUCKET}/x%0dFAKE%1b[2J\nX-Amz-Content-Sha256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    for _ in range(120):
        assert ask(server, unread)[0] == 400
    text = log.read_bytes()[before:].decode()
    assert text.count("\n") == 100
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_read_s_body_is_not_waited_for(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"OPTIONS /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 ")


class Small:
    """The server's connections around an application of a few lines."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()
        self.server = connections.Server("127.0.0.1", 0, self, connections.Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.entered.release()
        self.go_on.wait()
        try:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH", 0)))
            start_response("200 OK", [("Content-Length", "0")])
        except RequestTimeoutError as error:
            start_response(f"400 {error.code}", [("Content-Length", "0")])
        return []

    def ask(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request("GET", "/")
        return connection


ENDING = """
import os, signal, sys, threading
from dropforge.stack import objects
begin = threading.Thread.start
def start(thread):
    begin(thread)
    thread.join()
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
threading.Thread.start = start
objects.main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_when_it_is_told_wherever_it_is(tmp_path: Path, number: signal.Signals) -> None:
    """Told while it accepts a connection, whose thread has ended already."""
    port = control.choose_ports({}, {})["objects"]
    command = [sys.executable, "-c", ENDING, number.name, "--state", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: server.poll() is not None or bool(port_trouble(port, [LOCAL])))
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/-/health", timeout=5)
        assert server.wait(5) == 0
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def small() -> Iterator[Small]:
    found = Small()
    yield found
    found.go_on.set()
    found.server.shutdown()


def test_connections_are_bounded(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_room", threading.BoundedSemaphore(3))
    asked = [small.ask() for _ in range(5)]
    for _ in range(3):
        assert small.entered.acquire(timeout=60)
    assert not small.entered.acquire(timeout=0.3)
    small.go_on.set()
    assert [connection.getresponse().status for connection in asked] == [200] * 5
    # Whoever ends without a word gives the room back.
    for _ in range(5):
        socket.create_connection(("127.0.0.1", small.server.port)).close()
    assert small.ask().getresponse().status == 200


@pytest.mark.parametrize("hard", [4096, 64])
def test_connections_that_idle_leave_files_for_who_works(tmp_path: Path, hard: int) -> None:
    """Where few files may be open: more are asked for, or fewer connections taken."""
    server = Server(tmp_path / "state", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))).start()
    idle: list[socket.socket] = []
    try:
        works = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        works.connect()
        idle += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        works.request("GET", "/-/health")
        assert works.getresponse().status == 200
        assert server.process is not None
        seen = psutil.Process(server.process.pid)
        time.sleep(0.5)
        before = sum(seen.cpu_times()[:2])
        time.sleep(1)
        assert sum(seen.cpu_times()[:2]) - before < 0.3  # it does not try to accept again and again
        if hard > 64:
            server.client().put_object(Bucket=BUCKET, Key="a", Body=b"x" * 1_000_000)
    finally:
        for one in idle:
            one.close()
        server.kill()


def test_connections_are_as_many_as_there_are_files_for() -> None:
    assert [connections.most_connections(files) for files in (64, 1024, 1200, 1 << 20)] == [21, 341, 400, 400]


def test_a_client_that_sends_nothing_is_given_up(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PATIENCE", 100)
    small.go_on.set()
    address = "127.0.0.1", small.server.port
    for sent, told in (
        (b"", b""),
        (b"GET / HT", b""),
        (b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", b"RequestTimeout"),
    ):
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(sent)
            answer = connection.makefile("rb").read()
        assert (told in answer, bool(told)) == (True, bool(answer))


def test_bodies_that_nobody_signed_fill_no_memory(server: Server) -> None:
    """Who has a link knows the access key's name, and nothing that signs."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{server.access_key}/{now[:8]}/us-east-1/sqs/aws4_request"
    claim = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature={'0' * 64}"
    lines = ["POST / HTTP/1.1", f"Host: 127.0.0.1:{server.port}", f"X-Amz-Date: {now}", f"Authorization: {claim}"]
    with contextlib.ExitStack() as held:
        refused: list[bytes] = []
        for _ in range(40):
            one = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            one.sendall("\r\n".join([*lines, f"Content-Length: {4 << 20}", "", ""]).encode() + b"x" * 100_000)
            one.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                refused.append(one.recv(1 << 16))
        assert len(refused) == 8
        assert all(b"503 Slow Down" in one for one in refused)
        sqs = server.client("sqs")
        url = sqs.get_queue_url(QueueName="dropforge-drops")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="x" * 50_000)

    def sent() -> bool:
        with contextlib.suppress(sqs.exceptions.ClientError):  # until the server has seen that they are gone
            return bool(sqs.send_message(QueueUrl=url, MessageBody="x" * 200_000))
        return False

    until(sent)
    status, text = ask(server, "\n".join(["POST /", *lines[2:], f"Content-Length: {(4 << 20) + 1}"]))
    assert (status, "EntityTooLarge" in text) == (400, True)


def test_what_comes_after_an_answer_is_dropped_as_it_comes() -> None:
    class Endless(io.RawIOBase):
        left = 30 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            count = min(len(buffer), self.left)
            self.left -= count
            return count

    source = Endless()
    arriving = connections._Arriving(source)
    arriving.wanted = False
    tracemalloc.start()
    try:
        while arriving.read(10_000_000):
            pass
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert source.left == 0


ENTITIES = '<!DOCTYPE a [<!ENTITY b "bbb"><!ENTITY c "&b;&b;"><!ENTITY d SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("entity", ["c", "d"])
def test_a_document_with_entities_is_refused(server: Server, entity: str, encoding: str) -> None:
    text = f"{ENTITIES}<Delete><Object><Key>&{entity};</Key></Object></Delete>"
    for method, path in (
        ("POST", f"/{BUCKET}?delete"),
        ("PUT", f"/{BUCKET}?tagging"),
        ("PUT", f"/{BUCKET}?cors"),
        ("PUT", "/another"),
    ):
        status, answer = server.put(path, text.encode(encoding), method=method)
        assert (status, "MalformedXML" in answer) == (400, True), (path, answer)
    assert "Traceback" not in (server.state / "objects.log").read_text()


def test_a_document_of_another_shape_is_the_askers_error(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"x", Tagging="a=1")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    places = ("?delete", "?tagging", "?lifecycle", "?publicAccessBlock", "?ownershipControls", "?inventory&id=a")
    keys = ("/k?tagging", "/k?retention", "/k?restore", f"/m?uploadId={upload}")
    bodies = (b"<a/>", b"<a><b>1</b></a>", b"<Tagging/>", b"<Tagging><TagSet><Tag/></TagSet></Tagging>", b"{}")
    for place in (*places, *keys):
        for body in bodies:
            method = "POST" if place.partition("&")[0] in {"?delete", keys[2], keys[3]} else "PUT"
            status, answer = server.put(f"/{BUCKET}{place}", body, method=method)
            assert status == 400, (place, body, answer)
    assert server.put("/another", b"<CreateBucketConfiguration/>")[0] == 400
    assert client.get_object_tagging(Bucket=BUCKET, Key="k")["TagSet"] == [{"Key": "a", "Value": "1"}]
    assert "another" not in [item["Name"] for item in client.list_buckets()["Buckets"]]
    assert "Traceback" not in (server.state / "objects.log").read_text()


def test_versions_of_any_key_are_listed(server: Server) -> None:
    keys = ["a\0b", "c/d\x01+ %41", "c/ü&<", "f"]
    client = server.client()
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    assert [item["Key"] for item in client.list_object_versions(Bucket=BUCKET)["Versions"]] == keys
    found = client.list_object_versions(Bucket=BUCKET, Prefix="c/", Delimiter="+")
    assert (found["Prefix"], found["CommonPrefixes"]) == ("c/", [{"Prefix": "c/d\x01+"}])
    assert [item["Key"] for item in found["Versions"]] == ["c/ü&<"]
    pages = client.get_paginator("list_object_versions").paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 1})
    assert [item["Key"] for page in pages for item in page["Versions"]] == keys
    asked = client.list_object_versions(Bucket=BUCKET, Prefix="c/ü", EncodingType="url")
    assert [item["Key"] for item in asked["Versions"]] == ["c/%C3%BC%26%3C"]


SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>bad</Value></Tag></TagSet></Tagging>"


def framed(body: bytes) -> bytes:
    """A body in one chunk, whose signature is none."""
    last = b"0;chunk-signature=" + b"0" * 64 + b"\r\n\r\n"
    return b"%x;chunk-signature=%s\r\n%s\r\n%s" % (len(body), b"0" * 64, body, last)


def test_chunks_that_nobody_signed_change_nothing(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"good")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    delete = b"<Delete><Object><Key>k</Key></Object></Delete>"
    for method, path, body in (
        ("POST", "?delete=", delete),
        ("PUT", "?policy=", b'{"Version":"2012-10-17","Statement":[]}'),
        ("PUT", "/k?tagging=", TAGS),
        ("PUT", "/k?torrent=", b"bad"),
        ("PUT", "/k?select=", b"bad"),
        ("PUT", "/k?restore=", b"bad"),
        ("PUT", f"/m?partNumber=1&uploadId={upload}", b"bad"),
        ("PUT", f"/m?partNumber=1&tagging=&uploadId={upload}", b"bad"),
        ("PUT", f"/m?partNumber=1&torrent=&uploadId={upload}", b"bad"),
    ):
        headers = {"x-amz-decoded-content-length": str(len(body)), "x-amz-content-sha256": SIGNED_CHUNKS}
        for sent in (framed(body), body):
            status, text = server.put(f"/{BUCKET}{path}", sent, headers, method)
            assert 400 <= status < 500, (path, status, text)
    assert client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"good"
    assert client.get_object_tagging(Bucket=BUCKET, Key="k")["TagSet"] == []
    assert "Parts" not in client.list_parts(Bucket=BUCKET, Key="m", UploadId=upload)
    assert "Traceback" not in (server.state / "objects.log").read_text()


def test_a_trailer_is_what_was_promised(server: Server) -> None:
    streaming = {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "Content-Encoding": "aws-chunked"}
    sized = {**streaming, "x-amz-decoded-content-length": "5"}

    def sent(lines: dict[str, str], announced: str, headers: dict[str, str] = sized) -> tuple[int, str]:
        trailer = "".join(f"x-amz-checksum-{name}:{value}\r\n" for name, value in lines.items())
        told = {**headers, "x-amz-trailer": announced} if announced else headers
        return server.put(f"/{BUCKET}/k", f"5\r\nhello\r\n0\r\n{trailer}\r\n".encode(), told)

    right = {kind.lower(): checksum(kind, b"hello") for kind in KINDS}
    for name, value in right.items():
        wrong = base64.b64encode(bytes(len(base64.b64decode(value)))).decode()
        for status, code, answer in (
            (400, "BadDigest", sent({name: wrong}, f"x-amz-checksum-{name}")),
            (400, "BadDigest", server.put(f"/{BUCKET}/k", b"hello", {f"x-amz-checksum-{name}": wrong})),
            (400, "MalformedTrailerError", sent({}, f"x-amz-checksum-{name}")),
            (400, "MalformedTrailerError", sent({name: value}, "")),
            (411, "MissingContentLength", sent({name: value}, f"x-amz-checksum-{name}", streaming)),
        ):
            assert (answer[0], code in answer[1]) == (status, True), (name, answer)
    assert listing(server.client()) == []
    for name, value in right.items():
        assert sent({name: value}, f" X-Amz-Checksum-{name}")[0] == 200
        head = server.client().head_object(Bucket=BUCKET, Key="k", ChecksumMode="ENABLED")
        assert head[f"Checksum{name.upper()}"] == value


@pytest.mark.parametrize("header", ["Content-MD5", "x-amz-checksum-crc32", "x-amz-checksum-sha256"])
def test_a_document_s_checksums_are_checked(server: Server, header: str) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
    for value in ("1B2M2Y8AsgTpgAmY7PhCfg==", "AAAAAA==", "z"):
        status, text = server.put(f"/{BUCKET}/k?tagging=", TAGS, {header: value})
        assert (status, "BadDigest" in text) == (400, True), text
    assert client.get_object_tagging(Bucket=BUCKET, Key="k")["TagSet"] == []
    digest = {"Content-MD5": hashlib.md5(TAGS).digest(), "x-amz-checksum-sha256": hashlib.sha256(TAGS).digest()}
    good = digest.get(header, zlib.crc32(TAGS).to_bytes(4, "big"))
    assert server.put(f"/{BUCKET}/k?tagging=", TAGS, {header: base64.b64encode(good).decode()})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"<a>" * 100,
        b"<a>" * 33 + b"</a>" * 33,
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
        b"<Delete xmlns:s='s'>" + b"<s:Object><Key>k</Key></s:Object>" * 1001 + b"</Delete>",
        b"<Upload>" + b"<Part/>" * 10_001 + b"</Upload>",
        b"<Tagging>" + b"<Tag/>" * 100_000 + b"</Tagging>",
    ],
)
def test_a_document_that_would_take_long_is_refused_before_moto_s_turn(body: bytes) -> None:
    with pytest.raises(BodyError) as error:
        check_document({}, body)
    assert error.value.code == "MalformedXML"


def test_the_longest_documents_are_taken() -> None:
    check_document({}, b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1000 + b"</Delete>")
    part = b"<Part><PartNumber>1</PartNumber><ETag>x</ETag><ChecksumCRC32>x</ChecksumCRC32></Part>"
    check_document({}, b"<CompleteMultipartUpload>" + part * 10_000 + b"</CompleteMultipartUpload>")
    check_document({}, b"<a>" * 32 + b"</a>" * 32)


def test_what_a_client_gives_wrong_is_its_own_error(server: Server) -> None:
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    cases: list[tuple[str, str, dict[str, str], int]] = [
        ("GET", "?max-keys=abc", {}, 400),
        ("GET", "?list-type=2&max-keys=abc", {}, 400),
        ("GET", "?list-type=2&continuation-token=zzz", {}, 400),
        ("GET", "?versions=&max-keys=x", {}, 400),
        ("GET", "/k?partNumber=abc", {}, 400),
        ("GET", "/k", {"If-Modified-Since": "zzz"}, 400),
        ("PUT", f"/m?partNumber=abc&uploadId={upload}", {}, 400),
        ("PUT", "/c", {"x-amz-copy-source": "/"}, 400),
        ("PUT", "/c", {"x-amz-copy-source": "%ff"}, 400),
        ("PUT", "/c", {"x-amz-copy-source": "//["}, 400),
        ("PUT", f"/m?partNumber=1&uploadId={upload}", {"x-amz-copy-source": "/"}, 400),
        ("PATCH", "/k", {}, 405),
        ("POST", "/k", {}, 405),
    ]
    for method, path, headers, wanted in cases:
        status, text = server.put(f"/{BUCKET}{path}", b"", headers, method)
        assert status == wanted, (method, path, headers, text)
    assert client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"x"
    assert "Traceback" not in (server.state / "objects.log").read_text()
