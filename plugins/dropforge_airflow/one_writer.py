"""On SQLite, which the embedded stack has: requests that may write take turns within the API server.

Airflow notes what people do on the server's event loop. Where that waits for a request that has begun to write, and
this one for the loop to go on, neither does until SQLite gives up, a minute later, and a person sees an error.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PATIENCE: Final = 20.0  # seconds: who never ends its request shall not hold up all others


class OneWriter:
    """ASGI middleware of the whole server, Airflow's execution API with it.

    :param alone: whether one at a time may write; None for what Airflow's database says.
    :param patience: seconds that a request waits for its turn before it goes on without one.
    """

    def __init__(self, app: Any, alone: bool | None = None, patience: float = PATIENCE) -> None:
        self._app, self._patience = app, patience
        self._alone = _on_sqlite() if alone is None else alone
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._alone or scope["type"] != "http" or scope["method"] in _READS:
            await self._app(scope, receive, send)
            return
        try:
            await asyncio.wait_for(self._turn.acquire(), self._patience)
        except TimeoutError:
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._turn.release()


def _on_sqlite() -> bool:
    from airflow.configuration import conf

    return str(conf.get("database", "sql_alchemy_conn")).startswith("sqlite")
