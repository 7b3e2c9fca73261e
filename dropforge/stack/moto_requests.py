"""moto's applications are asked here, and what they fail at becomes the refusal that a client can understand."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

from dropforge.stack.answers import Answer, Environ, ServiceError
from dropforge.stack.request_log import REQUESTS

NOT_ALLOWED = "405 Method Not Allowed"
_BAD = "400 Bad Request"


def ask(application: Callable[..., Iterable[bytes]], environ: Environ, code: str = "MalformedXML") -> Answer:
    """Ask moto, without sending anything yet.

    :param code: what the service calls a document that it does not read.
    :raises ServiceError: if it fails since the request is not as it should be.
    """
    given: list[tuple[str, list[tuple[str, str]]]] = []
    try:
        body = application(dict(environ), lambda status, headers, _=None: given.append((status, headers)))
    except (LookupError, TypeError, AttributeError, ValueError, NotImplementedError, RecursionError) as error:
        raise _askers_error(environ, error, code) or error from None
    (status, headers), *_ = given
    return status, headers, body


def ask_s3(application: Callable[..., Iterable[bytes]], environ: Environ) -> Answer:
    status, headers, body = ask(application, environ)
    # S3 says it of buckets with versions only; rclone would ask for that version, which moto does not know then.
    return status, [header for header in headers if header != ("x-amz-version-id", "null")], body


def _askers_error(environ: Environ, error: Exception, code: str) -> ServiceError | None:
    """The refusal of what moto fails at since the asker gave what it does not look for; None if it is no such error."""
    asked = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if isinstance(error, NotImplementedError):
        return ServiceError(NOT_ALLOWED, "MethodNotAllowed", "The store has no such request")
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    with_document = environ["CONTENT_LENGTH"] not in {"", "0"}
    if not with_document and str(frame.f_globals.get("__name__")).startswith("dropforge."):
        return None  # an error of ours
    REQUESTS.warning("%s %.200s: moto does not read the request: %.200r", *asked, error)
    if with_document:
        return ServiceError(_BAD, code, "The document is not one that this request takes")
    return ServiceError(_BAD, "InvalidArgument", "A parameter or header is none of this request's")
