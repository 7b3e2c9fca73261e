"""In front of MLflow: the stack's own passwords, and the list of what trainings may write.

MLflow's rights cannot say it: every account may make names and rename what it may edit. And it takes tenths of a second
to find a password wrong, which here costs none.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]

_HEADERS: Final = frozenset({b"authorization", b"x-mlflow-authorization"})
_GATEWAY: Final = "/gateway/"  # where the first may hold a key for others, and the second MLflow's login
_ASK: Final = (b"www-authenticate", b'Basic realm="mlflow"')
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_API: Final = r"/(ajax-)?api/2\.0"
_WRITES: Final = re.compile(
    rf"""(POST|PATCH)\ {_API}/mlflow/(
          runs/(log-[a-z-]+|set-tag|delete-tag|update|outputs|search)
        | (runs|metrics|experiments|registered-models|model-versions)/[a-z-]*search
        | logged-models(/search|/[\w-]+(/(tags|params))?)?
        )
      | DELETE\ {_API}/mlflow/logged-models/[\w-]+/tags/[^/]+
      | (PUT|POST)\ {_API}/mlflow-artifacts/.+
    """,
    re.VERBOSE,
)


def may_write(method: str, path: str) -> bool:
    """Whether trainings may send this: to runs, their checkpoints' logged models and files; or it only reads."""
    return method in _READS or _WRITES.fullmatch(f"{method} {path}") is not None


def login_of(value: bytes) -> tuple[str, str] | None:
    """User and password of a header; None if it is no login by basic-auth."""
    scheme, _, told = value.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(told).decode().partition(":")
    except ValueError:
        return None
    return (user, password) if colon else None


class Guard:
    """An ASGI application around MLflow's.

    :param passwords: of the stack's accounts, by their names. :param bounded: name of the account of trainings.
    """

    def __init__(self, application: _App, passwords: Mapping[str, str], bounded: str) -> None:
        self._application = application
        self._passwords = passwords
        self._bounded = bounded

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        status = self._refused(scope) if scope["type"] == "http" else 0
        if not status:
            return await self._application(scope, receive, send)
        text, headers = (b"Permission denied", []) if status == 403 else (b"You are not authenticated.", [_ASK])
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        return None

    def _refused(self, scope: _Scope) -> int:
        """The status with which a request is refused here; 0 for none. MLflow refuses those without a login."""
        told = [(name, value) for name, value in scope["headers"] if name.lower() in _HEADERS]
        if len({name.lower() for name, _ in told}) != len(told):
            return 401
        for _, value in told:
            login = login_of(value)
            if login is None:
                if not scope["path"].startswith(_GATEWAY):
                    return 401
                continue
            user, password = login
            if user in self._passwords and not hmac.compare_digest(password.encode(), self._passwords[user].encode()):
                return 401
            if user == self._bounded and not may_write(scope["method"], scope["path"]):
                return 403
        return 0
