"""The embedded store's connections: how many there are, and what each may take before it is known who asks."""

from __future__ import annotations

import http.client
import io
import resource
import select
import socket
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import ThreadedWSGIServer

from dropforge.stack.body import RequestTimeoutError
from dropforge.stack.request_log import REQUESTS

_FILES = 2048  # as many as are enough for all that is open at once


def most_connections(files: int) -> int:
    """How many connections there may be: each takes a thread, and a file too while it is sent an object."""
    return min(400, files // 3)


def allowed_files() -> int:
    """How many files this process may have open once it has asked for them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)


def ask_for_files() -> None:
    """Raise the limit on open files that this process was started with, where it is low and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < allowed_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed_files(), hard))


_PATIENCE = 60_000  # milliseconds
_HEAD = 64 << 10
_BLOCK = 64 << 10

_room = threading.BoundedSemaphore(most_connections(allowed_files()))


class Server(ThreadedWSGIServer):
    """Accepts no more than `most_connections` at once, of all servers of the process; the next wait."""

    def process_request(self, request: Any, client_address: Any) -> None:
        _room.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:
            _room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            _room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base's
        """Log what ended a connection; a traceback, if it was not what its client sent."""
        error = sys.exc_info()[1]
        REQUESTS.error("A connection ended: %r", error, exc_info=not isinstance(error, http.client.HTTPException))


class Handler(MotoRequestHandler):
    """Logs nothing but failures: a line per request would be most of what the stack writes."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = self._arriving = _Arriving(_Socket(self.connection))

    def make_environ(self) -> dict[str, Any]:
        self._arriving.head = None
        environ = super().make_environ()
        # werkzeug's reader of chunks gives memory that nobody wrote to where a client ends early, or crashes.
        environ["wsgi.input"] = self.rfile
        environ.pop("wsgi.input_terminated", None)
        return environ

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        self._arriving.wanted = False

    def log_request(self, *_: object) -> None:
        pass

    def log(self, type: str, message: str, *args: object) -> None:
        if type == "error":
            REQUESTS.error(message, *args)


class _Socket(io.RawIOBase):
    """What a client sends, who is given up when nothing comes for a while; an answer may take as long as it likes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._poll.poll(_PATIENCE):
            raise RequestTimeoutError
        return self._connection.recv_into(buffer)


class _Arriving(io.BufferedReader):
    """What a client sends: a head within bounds, and after the answer what werkzeug drops, which is not kept."""

    head: int | None = _HEAD
    wanted = True

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if self.head is not None:
            self.head -= len(line)
            if self.head < 0:
                raise http.client.LineTooLong("head")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        if self.wanted or size is None:
            return super().read(size)
        last = b""
        while size > 0 and (block := self.read1(min(size, _BLOCK))):
            last, size = block, size - len(block)
        return last
