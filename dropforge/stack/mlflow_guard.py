"""In front of MLflow: the stack's own passwords, the list of what trainings may write, and bounds on what is sent.

MLflow's rights cannot say it: every account may make names and rename what it may edit. And it takes tenths of a second
to find a password wrong, which here costs none. It also keeps a body whole in memory before it asks who sends it; only
an artifact's upload is a stream, which it begins to read when it knows.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]

_HEADERS: Final = frozenset({b"authorization", b"x-mlflow-authorization"})
_GATEWAY: Final = "/gateway/"  # where the first may hold a key for others, and the second MLflow's login
_ASK: Final = (b"www-authenticate", b'Basic realm="mlflow"')
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_API: Final = r"/(ajax-)?api/2\.0"
_UPLOAD: Final = re.compile(rf"PUT {_API}/mlflow-artifacts/artifacts/.+")
_LARGEST: Final = 64 << 20
_TEXTS: Final = {
    401: b"You are not authenticated.",
    403: b"Permission denied",
    411: b"The request needs a Content-Length",
    413: b"The request is longer than %d MiB; send large files as artifacts" % (_LARGEST >> 20),
}
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


def body_refusal(method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The status with which a body is refused by what its head says of it; 0 for none."""
    told = {name.lower(): value for name, value in headers}
    if _UPLOAD.fullmatch(f"{method} {path}"):
        return 0
    if b"transfer-encoding" in told:
        return 411
    length = told.get(b"content-length", b"0")
    return 0 if length.isdigit() and len(length) < 16 and int(length) <= _LARGEST else 413


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request's head announces a body."""
    told = {name.lower(): value for name, value in headers}
    return b"transfer-encoding" in told or told.get(b"content-length", b"0").strip(b"0") != b""


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
        text, asked = _TEXTS[status], [_ASK] if status == 401 else []
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode()), *asked]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        return None

    def _refused(self, scope: _Scope) -> int:
        """The status with which a request is refused here; 0 for none. MLflow refuses others without a login."""
        told = [(name, value) for name, value in scope["headers"] if name.lower() in _HEADERS]
        if len({name.lower() for name, _ in told}) != len(told):
            return 401
        if has_body(scope["headers"]) and not any(login_of(value) for _, value in told):
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
        return body_refusal(scope["method"], scope["path"], scope["headers"])
