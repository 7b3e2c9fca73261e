"""In front of MLflow: the stack's own passwords, the list of what trainings may write, and bounds on what is sent.

MLflow's rights cannot say it: every account may make names and rename what it may edit. And it takes tenths of a second
to find a password wrong, which here costs none. It also keeps a body whole in memory before it asks who sends it; only
an artifact's upload is a stream, which it begins to read when it knows.

Tags are orders too (`dropforge.training_tags`), so bodies of trainings are read here for the tags that they set.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

from dropforge.training_tags import may_set

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]

_HEADERS: Final = frozenset({b"authorization", b"x-mlflow-authorization"})
_GATEWAY: Final = "/gateway/"  # where the first may hold a key for others, and the second MLflow's login
_ASK: Final = (b"www-authenticate", b'Basic realm="mlflow"')
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_API: Final = r"/(ajax-)?api/2\.0"
_FILES: Final = re.compile(rf"{_API}/mlflow-artifacts/.+")
_UPLOAD: Final = re.compile(rf"PUT {_API}/mlflow-artifacts/artifacts/.+")
_PARTS: Final = re.compile(rf"POST {_API}/mlflow-artifacts/mpu/create(/.*)?")
_MOST_PARTS: Final = 10_000  # S3's own limit
_LARGEST: Final = 64 << 20
_LARGEST_READ: Final = 8 << 20  # of a training's, which is read here; MLflow takes a batch of 1 MB
_TEXTS: Final = {
    400: b"An upload has 1 to %d parts" % _MOST_PARTS,
    401: b"You are not authenticated.",
    403: b"Permission denied",
    411: b"The request needs a Content-Length",
    413: b"The request is longer than %d MiB, or %d MiB from a training; send large files as artifacts"
    % (_LARGEST >> 20, _LARGEST_READ >> 20),
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
_OF_MODEL: Final = re.compile(rf"{_API}/mlflow/logged-models(/.*)?")
_TAG: Final = re.compile(rf"{_API}/mlflow/logged-models/[\w-]+/tags/([^/]+)")


def may_write(method: str, path: str) -> bool:
    """Whether trainings may send this: to runs, their checkpoints' logged models and files; or it only reads."""
    if method in _READS:
        return True
    tag = _TAG.fullmatch(path)
    return _WRITES.fullmatch(f"{method} {path}") is not None and (tag is None or may_set(tag[2], checkpoint=True))


def may_tag(path: str, body: bytes) -> bool:
    """Whether trainings may send this JSON: every tag that it names, at any depth, is one of theirs.

    What MLflow might read in another way than it is read here is refused.
    """
    checkpoint = _OF_MODEL.fullmatch(path) is not None
    pairs = _pairs(body or b"{}")
    return pairs is not None and all(
        may_set(str(value), checkpoint=checkpoint) for name, value in pairs if name == "key"
    )


def may_upload(body: bytes) -> bool:
    """Whether MLflow may be asked for so many parts of an upload, each of which it signs before it answers."""
    pairs = _pairs(body)
    if pairs is None:
        return False
    counts = [value for name, value in pairs if name.replace("_", "").lower() == "numparts"]
    return all(type(count) is int and 0 < count <= _MOST_PARTS for count in counts)


def _pairs(body: bytes) -> list[tuple[str, Any]] | None:
    """Names with their values at any depth of a JSON object, also those that stand there twice; None if it is none."""
    found: list[tuple[str, Any]] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(pairs)
        return dict(pairs)

    try:
        whole = json.loads(body.decode(), object_pairs_hook=look)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(whole, dict) else None  # MLflow decodes a string once more


def body_refusal(method: str, path: str, headers: Iterable[tuple[bytes, bytes]], largest: int = _LARGEST) -> int:
    """The status with which a body is refused by what its head says of it; 0 for none."""
    told = {name.lower(): value for name, value in headers}
    if _UPLOAD.fullmatch(f"{method} {path}"):
        return 0
    if b"transfer-encoding" in told:
        return 411
    length = told.get(b"content-length", b"0")
    return 0 if length.isdigit() and len(length) < 16 and int(length) <= largest else 413


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
        status, read = self._refused(scope) if scope["type"] == "http" else (0, False)
        if read and not status:
            body = await _whole(receive)
            if body is None:
                return None
            if _PARTS.fullmatch(f"{scope['method']} {scope['path']}"):
                status = 0 if may_upload(body) else 400
            else:
                status = 0 if may_tag(scope["path"], body) else 403
            receive = _again(body, receive)
        if not status:
            return await self._application(scope, receive, send)
        text, asked = _TEXTS[status], [_ASK] if status == 401 else []
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode()), *asked]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        return None

    def _refused(self, scope: _Scope) -> tuple[int, bool]:
        """The status with which a request is refused here, and whether its body has to be read before it passes.

        0 for no status. MLflow refuses others without a login.
        """
        told = [(name, value) for name, value in scope["headers"] if name.lower() in _HEADERS]
        if len({name.lower() for name, _ in told}) != len(told):
            return 401, False
        if has_body(scope["headers"]) and not any(login_of(value) for _, value in told):
            return 401, False
        bounded = False
        for _, value in told:
            login = login_of(value)
            if login is None:
                if not scope["path"].startswith(_GATEWAY):
                    return 401, False
                continue
            user, password = login
            if user in self._passwords and not hmac.compare_digest(password.encode(), self._passwords[user].encode()):
                return 401, False
            bounded |= user == self._bounded
        method, path = scope["method"], scope["path"]
        if bounded and not may_write(method, path):
            return 403, False
        read = bounded and method not in _READS and not _FILES.fullmatch(path)
        read |= _PARTS.fullmatch(f"{method} {path}") is not None
        return body_refusal(method, path, scope["headers"], _LARGEST_READ if read else _LARGEST), read


async def _whole(receive: Any) -> bytes | None:
    """The body of a request; None if its sender is gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """What gives a body that was read once more, and then what comes after it."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Any:
        return left.pop() if left else await receive()

    return give
