"""Which writes the embedded S3 takes. moto passes over what it does not know, and does the rest of the request.

So what is taken is listed: the sub-resources that moto changes, and the conditions that somebody checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from dropforge.stack.answers import Environ, ServiceError
from dropforge.stack.moto_requests import NOT_ALLOWED
from dropforge.stack.signatures import parse_date

_BAD = "400 Bad Request"
_DOCUMENTS = ("acl", "legal-hold", "retention", "tagging")  # sub-resources of a key that a PUT sends as XML
_PART = ("partNumber", "uploadId")
# What a write may name in its query, in the order of the alphabet: by its method, and whether it is one to a key.
_LISTED = {
    ("PUT", True): ("", "partNumber uploadId", *_DOCUMENTS, *(f"{name} versionId" for name in _DOCUMENTS)),
    ("POST", True): ("uploads", "uploadId", "restore", "restore versionId", "select", "select select-type"),
    ("DELETE", True): ("", "versionId", "uploadId", "tagging", "tagging versionId"),
    ("PUT", False): (
        "", "accelerate", "acl", "cors", "encryption", "id inventory", "lifecycle", "logging", "notification",
        "object-lock", "ownershipControls", "policy", "publicAccessBlock", "replication", "tagging", "versioning",
        "website",
    ),
    ("POST", False): ("", "delete"),
    ("DELETE", False): (
        "", "cors", "encryption", "lifecycle", "ownershipControls", "policy", "publicAccessBlock", "replication",
        "tagging", "website",
    ),
}  # fmt: skip
_TAKEN = {place: {tuple(names.split()) for names in listed} for place, listed in _LISTED.items()}
# Names in a query that S3 takes for a signature, for a header or for nothing.
_BESIDE = re.compile(r"(?i:x-|content-).*|AWSAccessKeyId|Expires|Signature")
_CONDITION = re.compile(r"HTTP_(X_AMZ_((COPY|RENAME)_SOURCE_)?)?IF_\w+|HTTP_X_AMZ_WRITE_OFFSET_BYTES")
_IF_MATCH, _IF_NONE_MATCH = "HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"
_SOURCE = "HTTP_X_AMZ_COPY_SOURCE"
_OF_SOURCE = {f"{_SOURCE}_IF_{name}" for name in ("MATCH", "NONE_MATCH", "MODIFIED_SINCE", "UNMODIFIED_SINCE")}


def check_asked(method: str, key: str, query: Set[str]) -> None:
    """:raises ServiceError: if the write is of a sub-resource that moto does not know."""
    names = _named(query)
    if names not in _TAKEN.get((method, bool(key)), ()):
        asked = "?" + "&".join(map(quote, names))[:100] if names else "the whole"
        kind = "a key" if key else "a bucket"
        raise ServiceError(NOT_ALLOWED, "MethodNotAllowed", f"The embedded stack has no {method} of {asked} of {kind}")


def sends_object(method: str, key: str, query: Set[str]) -> bool:
    """Whether a request's body is the bytes of an object or of a part, and no document."""
    return method == "PUT" and bool(key) and _named(query) in {(), _PART}


def _named(query: Set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in query if not _BESIDE.fullmatch(name)))


def check_conditions(environ: Environ, key: str, query: Set[str]) -> None:
    """Refuse the conditions that nobody checks: who makes them means not to write without.

    :raises ServiceError:
    """
    asked = (environ["REQUEST_METHOD"], _named(query)) if key else None
    checked = set()
    if asked in {("PUT", ()), ("DELETE", ()), ("POST", ("uploadId",))}:
        checked.add(_IF_MATCH)
    if asked in {("PUT", ()), ("POST", ("uploadId",))} and environ.get(_IF_NONE_MATCH) == "*":
        checked.add(_IF_NONE_MATCH)
    if asked in {("PUT", ()), ("PUT", _PART)} and _SOURCE in environ:
        checked |= _OF_SOURCE
    linked = {_variable(name) for name in query}  # a link may say in its query what else is a header
    unknown = [name for name in (environ.keys() - checked) | linked if _CONDITION.fullmatch(name)]
    if unknown:
        header = min(unknown).removeprefix("HTTP_").replace("_", "-").lower()
        message = f"The embedded stack does not check {header} of this request (and of If-None-Match takes `*`)"
        raise ServiceError("501 Not Implemented", "NotImplemented", message)


def _variable(name: str) -> str:
    return f"HTTP_{name.upper().replace('-', '_')}"


@dataclass(frozen=True)
class Source:
    """The object's version that a request copies from."""

    bucket: str
    key: str
    version: str | None


def read_source(environ: Environ) -> Source | None:
    """Parse `x-amz-copy-source`. :raises ServiceError:"""
    try:
        found = urlsplit(environ.get(_SOURCE, ""))
    except ValueError:
        raise ServiceError(_BAD, "InvalidArgument", "x-amz-copy-source is no bucket and key") from None
    bucket, _, key = unquote(found.path).lstrip("/").partition("/")
    return Source(bucket, key, parse_qs(found.query).get("versionId", [None])[0]) if key else None


def check_source(environ: Environ, etag: str, changed: datetime) -> None:
    """Hold a copy's conditions against its source. A tag that is right outweighs a date, as in HTTP.

    :raises ServiceError: if one does not hold, or is no date.
    """
    match, other, since, until = (
        environ.get(f"{_SOURCE}_IF_{name}") for name in ("MATCH", "NONE_MATCH", "MODIFIED_SINCE", "UNMODIFIED_SINCE")
    )
    changed = changed.replace(microsecond=0, tzinfo=UTC)  # moto knows no zone, and HTTP no fractions
    holds = _names(match, etag) if match is not None else until is None or changed <= _date(until)
    differs = not _names(other, etag) if other is not None else since is None or changed > _date(since)
    if not (holds and differs):
        raise ServiceError("412 Precondition Failed", "PreconditionFailed", "The source is not as the copy wants it")


def _names(given: str, etag: str) -> bool:
    return given.strip('"') in {"*", etag.strip('"')}


def _date(text: str) -> datetime:
    found = parse_date(text)
    if found is None:
        raise ServiceError(_BAD, "InvalidArgument", f"{text[:100]} is no date of HTTP")
    return found


def check_owners(environ: Environ, query: Mapping[str, list[str]], account: str) -> None:
    """:raises ServiceError: if a request, or a link in its query, expects a bucket to be another account's."""
    told = {name.lower(): values[-1] for name, values in query.items()}
    for name in ("x-amz-expected-bucket-owner", "x-amz-source-expected-bucket-owner"):
        owner = environ.get(_variable(name), told.get(name, account))
        if owner != account:
            raise ServiceError("403 Forbidden", "AccessDenied", f"{name} is not {account}, which owns all buckets here")


def check_policy(data: bytes) -> None:
    """Hold a bucket's policy against what moto will read of it at each request to the bucket.

    :raises ServiceError: if moto would fail.
    """
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        found = None
    statements = found.get("Statement") if isinstance(found, dict) else None
    statements = [statements] if isinstance(statements, dict) else statements
    if not isinstance(statements, list) or not all(map(_is_statement, statements)):
        message = "A policy is JSON with a list `Statement`; each has an Effect, an Action and a Resource"
        raise ServiceError(_BAD, "MalformedPolicy", message)


def _is_statement(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("Effect") not in ("Allow", "Deny"):
        return False
    for name in ("Action", "Resource"):
        asked = [found[kind] for kind in (name, f"Not{name}") if kind in found]
        if len(asked) != 1 or not _are_patterns(asked[0]):
            return False
    condition = found.get("Condition", {})
    return isinstance(condition, dict) and all(isinstance(values, dict) for values in condition.values())


def _are_patterns(found: Any) -> bool:
    patterns = found if isinstance(found, list) else [found]
    try:
        for pattern in patterns:
            re.compile(pattern.replace("*", ".*"))  # as moto does
    except (AttributeError, TypeError, re.error):
        return False
    return bool(patterns)
