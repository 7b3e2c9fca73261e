"""Servers that answer as a test likes: what is none of ours, what lies, and what does not end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """One that answers as `answer` says. :ivar seen: path and login of each request."""

    def __init__(self, answer: Answer) -> None:
        self.seen: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.seen.append((self.path, self.headers.get("Authorization")))
                try:
                    answer(self)
                except OSError:
                    self.close_connection = True

            do_POST = do_GET  # noqa: N815
            do_PUT = do_GET  # noqa: N815
            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def told(value: Any, status: int = 200, **headers: str) -> Answer:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, text)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    return answer


def chunks(piece: bytes, pause: float, status: int = 200) -> Answer:
    """An answer without an end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(pause)

    return answer
