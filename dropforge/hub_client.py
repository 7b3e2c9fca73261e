"""The hub's client within bounds: what an answer may hold, how large it may be, how long it may take.

Whoever has a hub, or stands between it and us, decides every header and byte of an answer. The client takes parts of a
file's path from them, keeps what comes until it ends, and asks where it is told to with our token. So hooks of the
client look at every request and answer while we ask (`within`), whichever of its functions made them; what user code
asks for at other times is its own affair.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

from dropforge.web import origin

SECONDS: Final = 20  # that the hub may be silent
#: Bytes of an answer that is no file. A hundred thousand names have about ten million.
LARGEST_ANSWER: Final = 16 << 20
#: What all of these may hold together, and how many there may be, while one thing is asked for: a list has pages.
MOST_BYTES: Final = 256 << 20
MOST_ANSWERS: Final = 2_000
#: An answer may be waited for this long, and a second more for so many bytes that came.
PATIENCE: Final = 60.0
SLOWEST: Final = 10 << 10
LONGEST_PAUSE: Final = 60  # seconds that a hub may have us wait; the client asks five times again

_LEAST: Final = 1 << 16  # beside a small file, the client may ask for a word about it
_HOME: Final = "https://huggingface.co"
_HOMES: Final = (_HOME, "https://hf.co")
_ETAG: Final = re.compile(r'(?:W/)?"?(?:[0-9a-f]{40}|[0-9a-f]{64})"?')
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PAUSE: Final = re.compile(r"(\bt\s*=\s*)(\d+)")

_lock = threading.Lock()
_asking = 0
_came: dict[str, int] = {}
_most: ContextVar[int] = ContextVar("_most", default=LARGEST_ANSWER)
_closed: ContextVar[bool] = ContextVar("_closed", default=False)
_named: set[tuple[str, str, int | None]] = set()


class StrangeAnswerError(Exception):
    """An answer that no hub gives."""


class UnwantedRequestError(Exception):
    """A request that a library makes on its own, by what a file says."""


@contextmanager
def within(most: int) -> Iterator[None]:
    """Hold what the client is answered to its bounds until the block ends.

    :param most: bytes of a file that is asked for in this thread.
    """
    global _asking
    token = _most.set(most)
    with _lock:
        if not _asking:
            _came.clear()
        _asking += 1
    try:
        yield
    finally:
        with _lock:
            _asking -= 1
        _most.reset(token)


@contextmanager
def without_requests() -> Iterator[None]:
    """Refuse what the client is made to ask in this thread until the block ends: what is read lies here already.

    :raises UnwantedRequestError: naming what is asked for.
    """
    bound_requests()
    token = _closed.set(True)
    try:
        yield
    finally:
        _closed.reset(token)


def bound_requests(endpoint: str | None = None) -> None:
    """Have this process's client look at each request and answer, a client that it makes anew too.

    :param endpoint: a hub beside the environment's, which may have our token.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    if endpoint is not None:
        _named.add(origin(endpoint))
    make: Any = _http._GLOBAL_CLIENT_FACTORY
    if getattr(make, "bound", False):
        return

    def bound() -> Any:
        client = make()
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], _see_request], "response": [*hooks["response"], _see]}
        return client

    bound.bound = True  # type: ignore[attr-defined]
    set_client_factory(bound)


def _see_request(request: Any) -> None:
    """Bound the silence; ask for bytes as they are, which can be counted; keep the token where it belongs."""
    if _closed.get():
        raise UnwantedRequestError(f"{request.url.host}{request.url.path}"[:200])
    limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
    request.extensions["timeout"] = {key: SECONDS if limit is None else limit for key, limit in limits.items()}
    if not _asking:
        return
    request.headers["Accept-Encoding"] = "identity"
    if "authorization" in request.headers and not _may_have_token(str(request.url)):
        raise StrangeAnswerError(f"it sends us to {request.url.host} with our token")


def _may_have_token(url: str) -> bool:
    from huggingface_hub import constants

    return origin(url) in {*_named, *map(origin, (constants.ENDPOINT, *_HOMES))}


def _see(response: Any) -> None:
    """See that an answer's headers are of a hub, and have its body counted as it comes."""
    if not _asking:
        return
    headers, head = response.headers, response.request.method == "HEAD"
    check_headers(headers, head=head, final=response.is_success)
    if origin(str(response.request.url)) != origin(_HOME):
        # What Xet's own client fetches, nobody counts: elsewhere than at home files come by HTTP.
        headers.pop("X-Xet-Hash", None)
    if head:
        return
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise StrangeAnswerError("it packs what we asked for as it is")
    most = max(_most.get(), _LEAST) if response.is_success else LARGEST_ANSWER
    listed = most == LARGEST_ANSWER
    if listed:
        _count("answers", 1, MOST_ANSWERS)
    told = headers.get("Content-Length", "")
    if told.isdecimal() and (len(told) > 20 or int(told) > most):
        raise _too_large(most)
    base: Any = import_module(type(response).__module__.partition(".")[0]).SyncByteStream
    response.stream = type("Counted", (_Counted, base), {})(response.stream, most, listed=listed)


def _count(what: str, more: int, most: int) -> None:
    """:raises StrangeAnswerError: where all answers that are no files are too many together."""
    with _lock:
        _came[what] = _came.get(what, 0) + more
        if _came[what] > most:
            raise StrangeAnswerError(f"its lists have more than the {most:,} {what} that there may be, and do not end")


def check_headers(headers: Any, *, head: bool, final: bool) -> None:
    """Check what the client makes paths and pauses of; a pause is shortened where it stands.

    :param headers: of the answer. :param head: whether its request asked for them alone, as for a file's digest.
    :param final: whether the client goes on with this answer, not with the one that it leads to.
    :raises StrangeAnswerError: if a commit or digest is none.
    """
    if (commit := headers.get("X-Repo-Commit")) is not None and not _COMMIT.fullmatch(commit):
        raise StrangeAnswerError(f"it names a commit that is none: {commit[:60]!r}")
    for name in ("X-Linked-Etag", "ETag") if head else ():
        if (etag := headers.get(name)) is not None and not _ETAG.fullmatch(etag):
            if final:
                raise StrangeAnswerError(f"it names a digest that is none: {etag[:60]!r}")
            del headers[name]  # of a redirect's own page; without a digest the client takes no file
    if (pause := headers.get("Retry-After")) is not None:
        headers["Retry-After"] = str(_pause(pause)) if pause.isdecimal() else str(LONGEST_PAUSE)
    if (limit := headers.get("ratelimit")) is not None:
        headers["ratelimit"] = _PAUSE.sub(lambda found: f"{found[1]}{_pause(found[2])}", limit)


def _pause(digits: str) -> int:
    return LONGEST_PAUSE if len(digits) > 9 else min(int(digits), LONGEST_PAUSE)


def _too_large(most: int) -> StrangeAnswerError:
    return StrangeAnswerError(f"it sends more than the {most:,} bytes that there may be")


class _Counted:
    """The bytes of an answer as they come, which end where there are too many, or they come too slowly."""

    def __init__(self, stream: Any, most: int, *, listed: bool) -> None:
        self._stream, self._most, self._listed = stream, most, listed

    def __iter__(self) -> Iterator[bytes]:
        pieces, came, waited = iter(self._stream), 0, 0.0
        while True:
            begun = time.monotonic()
            piece = next(pieces, None)
            waited += time.monotonic() - begun  # not what the reader does in between
            if piece is None:
                return
            came += len(piece)
            if came > self._most:
                raise _too_large(self._most)
            if self._listed:
                _count("bytes", len(piece), MOST_BYTES)
            if waited > PATIENCE + came / SLOWEST:
                raise StrangeAnswerError(f"it sent {came:,} bytes in {waited:.0f} s and does not end")
            yield piece

    def close(self) -> None:
        self._stream.close()
