"""moto's server of S3 and SQS for tests, which answers one request to S3 at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock, Thread
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


@contextmanager
def moto_server() -> Iterator[str]:
    """Serve on a free port of this machine; yield the address.

    moto's own server looks at an object and writes it without a lock between, so two racers may both win.
    """
    application, turn = DomainDispatcherApplication(create_backend_app), Lock()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        waits = "/sqs/" in environ.get("HTTP_AUTHORIZATION", "")  # for a message, while others send it
        with nullcontext() if waits else turn:
            return [b"".join(application(environ, start))]

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
