"""Requests that nobody signed, or that whoever holds a link makes wrong: they are refused and cost little."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from dropforge.stack.bodies import Spool
from dropforge.stack.body import BodyError, read_body
from tests.stack.conftest import Server
from tests.stack.test_objects import BUCKET, bodies, listing

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
