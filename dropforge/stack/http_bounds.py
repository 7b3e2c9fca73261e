"""How MLflow's and Airflow's servers of the stack read HTTP: with bounds on what comes before anybody says who it is.

uvicorn keeps a head of any length, and waits without end for a request. What is sent as a body is bounded by
`mlflow_guard` and `dropforge_airflow.body_limit`, which know who sends it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGEST_HEAD: Final = 64 << 10  # bytes, and what comes at once with the first of them
PATIENCE: Final = 60.0  # seconds in which nothing comes of a request


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection on which much or nothing comes that is no part of a body, and no whole head."""

    _useless = 0  # bytes since a head, a piece of a body or a request was whole
    _awaits = True  # more of a request, or the first one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base's
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._useless += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self not in self.connections:  # which a web socket is not any more
            return
        if self._useless > max(LARGEST_HEAD, len(data)):
            self.logger.warning("A request's head is longer than %d bytes.", LARGEST_HEAD)
            self.send_400_response("The request's head is too long.")
        elif self._awaits and not self.flow.read_paused:
            self._wait()

    def on_message_begin(self) -> None:
        self._awaits = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._useless = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._useless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._useless, self._awaits = 0, False
        super().on_message_complete()

    def _wait(self) -> None:
        # By uvicorn's own timer, which it stops when something comes.
        self.timeout_keep_alive_task = self.loop.call_later(PATIENCE, self.timeout_keep_alive_handler)


def use() -> None:
    """Have all servers of this process that are told no protocol read HTTP so."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHttp.__name__}"
