"""What MLflow's and Airflow's servers read before they know who sends it: a real uvicorn, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import uvicorn

from dropforge.stack import http_bounds
from dropforge.stack.http_bounds import LARGEST_HEAD, BoundedHttp

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
LINES = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 60) for number in range(1000))


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the number of a body's bytes, after the seconds that the path names."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await asyncio.sleep(float(scope["path"].strip("/") or 0))
    text = str(size).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http_bounds, "PATIENCE", 0.5)
    config = uvicorn.Config(count, http=BoundedHttp, lifespan="off", log_config=None)
    server, place = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([place],), daemon=True)
    thread.start()
    yield place.getsockname()[1]
    server.should_exit = True
    thread.join()


def told(port: int, *pieces: bytes, pause: float = 0) -> bytes:
    """Send pieces of a request; all that is answered until the server ends the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            while got := connection.recv(1 << 16):
                answer += got
        return answer


def send(port: int, pieces: Iterable[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEAD, LINES),
        (HEAD + b"x: ", LINES[:65_000].replace(b"\r\n", b"")),
        (b"GET /", b"a" * 60_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", LINES),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 60_000),
    ],
    ids=["lines", "line", "address", "trailers", "chunk"],
)
def test_what_is_no_body_ends(port: int, first: bytes, piece: bytes) -> None:
    with pytest.raises(ConnectionError):
        send(port, [first, *[piece] * 1000])  # 60 MB


def test_what_a_client_sends_is_read(port: int) -> None:
    body = b"b" * (4 * LARGEST_HEAD)
    whole = HEAD + b"x: " + b"a" * (LARGEST_HEAD // 2) + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    last = HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
    assert told(port, whole + body, whole + body, last, pause=0.1).count(b"\r\n\r\n%d" % len(body)) == 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (40_000, b"c" * 40_000) for _ in range(10))
    ended = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert told(port, ended).endswith(b"\r\n\r\n400000")


def test_who_sends_nothing_is_given_up_and_who_waits_is_not(port: int) -> None:
    for pieces in ((), (b"GET",), (HEAD + b"Content-Length: 9\r\n\r\nx",)):
        began = time.monotonic()
        assert told(port, *pieces) == b""
        assert time.monotonic() - began < 5
    slow = b"GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert told(port, slow).endswith(b"\r\n\r\n0")
    assert told(port, *(bytes([byte]) for byte in slow[:5]), slow[5:], pause=0.15).endswith(b"\r\n\r\n0")
