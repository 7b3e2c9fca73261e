"""What tasks of our DAGs wrote stays as it is: XComs and task state decide what is trained, and who has said yes.

Airflow lets each user who may start a run change them too. The plugin puts this in front of the API; tasks write by
another one, which asks for a token of theirs.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Of which DAGs, and whatever Airflow is mounted under.
_KEPT: Final = re.compile(
    r"/dags/dropforge_[^/]*/dagRuns/.*/taskInstances/.*/(?:xcomEntries|state-store)(?:/|$)", re.DOTALL
)
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_REFUSED: Final = json.dumps(
    {
        "detail": "XComs and task state of Dropforge's DAGs decide what is trained and promoted, so nothing but their "
        "tasks writes them. Trigger a run with other values, or clear the task that made this one"
    }
).encode()


class WriteGuard:
    """An ASGI middleware that answers 403 to who would change what a task of our DAGs wrote."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READS or not _KEPT.search(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSED)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSED})


def middleware() -> dict[str, Any]:
    """Return it as a plugin names it."""
    return {"middleware": WriteGuard, "args": [], "kwargs": {}, "name": "Dropforge's guard of XComs and task state"}
