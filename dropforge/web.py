"""One request by HTTP, with credentials perhaps: it goes to no other server, and its answer ends in time and bytes."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}
_PIECE: Final = 1 << 20
_TOLD: Final = 2000  # bytes of an error


class ElsewhereError(OSError):
    """The server sends us to another one, which is told nothing."""


class TooLongError(OSError):
    """The answer is longer than anything of its kind may be, or does not end."""


def origin(address: str) -> tuple[str, str, int | None]:
    """Scheme, host and port, which together say who is asked. :raises ValueError: if the port is no number."""
    parts = urlsplit(address)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme)


def read(
    request: urllib.request.Request, context: ssl.SSLContext, *, silence: float, seconds: float, most: int
) -> bytes:
    """Ask, and read the answer whole.

    :param silence: seconds without a byte. :param seconds: for all of it. :param most: bytes of the answer.
    :raises urllib.error.HTTPError: for a status that is none of success, with the beginning of what it says.
    :raises ElsewhereError, TooLongError: as they say. :raises OSError, http.client.HTTPException: as urllib.
    """
    with Watch(seconds) as watch:
        opener = urllib.request.build_opener(_Stay, _Plain(watch), _Secret(watch, context))
        try:
            data = _told(opener, request, silence, most)
        except (OSError, http.client.HTTPException):
            if watch.over:
                raise _late(request, seconds) from None
            raise
    if watch.over:  # it may look like an end
        raise _late(request, seconds)
    return data


def _told(opener: urllib.request.OpenerDirector, request: urllib.request.Request, silence: float, most: int) -> bytes:
    try:
        with opener.open(request, timeout=silence) as answer:
            return _bounded(answer, most, request)
    except urllib.error.HTTPError as error:
        with error:  # here, where the time is watched
            text = io.BytesIO(error.read(_TOLD))
        raise urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, text) from None


def _bounded(answer: Any, most: int, request: urllib.request.Request) -> bytes:
    parts, left = [], most + 1
    while left > 0 and (part := answer.read(min(left, _PIECE))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise TooLongError(f"the answer to {_path(request)} has more than {most:,} bytes")
    return b"".join(parts)


def _late(request: urllib.request.Request, seconds: float) -> TooLongError:
    return TooLongError(f"the answer to {_path(request)} has not ended after {seconds:.0f} s")


def _path(request: urllib.request.Request) -> str:
    return urlsplit(request.full_url).path


@dataclass
class Watch:
    """Ends connections when their time is over, whatever waits at them."""

    seconds: float
    over: bool = False
    _sockets: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._timer = threading.Timer(self.seconds, self._end)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def add(self, connection: socket.socket) -> None:
        self._sockets.append(connection)

    def _end(self) -> None:
        self.over = True
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows redirections within one server: urllib's own takes the login wherever it is sent."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if origin(newurl) != origin(req.full_url):
            fp.close()
            scheme, host, port = origin(newurl)
            raise ElsewhereError(f"it sends us to another server, {scheme}://{host}:{port}, to which nothing is sent")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPConnection, self._watch), req)


class _Secret(urllib.request.HTTPSHandler):
    def __init__(self, watch: Watch, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._watch, self._trust = watch, context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPSConnection, self._watch), req, context=self._trust)


def _watched(kind: Any, watch: Watch) -> Any:
    class Connection(kind):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            watch.add(self.sock)

    return Connection
