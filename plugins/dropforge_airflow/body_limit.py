"""Bounds on what Airflow's API server is sent: FastAPI keeps a body whole in memory before it asks who sends it.

The plugin puts them in front of the API of the embedded stack and of docker-compose.yaml, that of `http_bounds` for
heads too, since it is loaded before uvicorn begins; another Airflow has a proxy for that.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from dropforge.text import escape, shorten

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

VARIABLE = "DROPFORGE_API_LARGEST_BODY"


class BodyLimit:
    """An ASGI middleware that answers 413 to a body of more than `largest` bytes, announced or sent."""

    def __init__(self, app: ASGIApp, largest: int) -> None:
        self._app, self._largest = app, largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 15 or int(length) > self._largest:
            text = b"The request is longer than %d bytes" % self._largest
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": text})
            return
        left = self._largest

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                from starlette.exceptions import HTTPException  # which FastAPI passes on from a body that it reads

                raise HTTPException(413)
            return message

        await self._app(scope, bounded, send)


def middlewares() -> list[dict[str, Any]]:
    """Return what the environment asks the plugin to put in front of Airflow's API, and bound heads there.

    :raises SystemExit: if the environment says no number. Airflow goes on without a plugin that raises another error,
        which here would be without the bound.
    """
    largest = os.environ.get(VARIABLE)
    if not largest:
        return []
    if not re.fullmatch(r"[1-9][0-9]{0,14}", largest):
        raise SystemExit(
            f"setting {VARIABLE}: {shorten(escape(largest), 40)!r} is no number of bytes. Write one, such as 67108864"
        )
    from dropforge.stack import http_bounds

    http_bounds.use()
    return [
        {"middleware": BodyLimit, "args": [], "kwargs": {"largest": int(largest)}, "name": "Dropforge's body limit"}
    ]
