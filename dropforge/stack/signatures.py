"""Whether a request is signed with this stack's secret key and still in time, as S3 and SQS judge it.

botocore's signers say what a signature should be. AWS takes the address apart and encodes it anew before it looks at
the signature, so a signature holds for the address as it came and as AWS would write it: both name the same thing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPMessage
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes, urlsplit

from botocore.auth import EMPTY_SHA256_HASH, SIGV4_TIMESTAMP, HmacV1Auth, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials

Environ = dict[str, Any]

_SKEW = timedelta(minutes=15)
_WEEK = 7 * 24 * 3600
_TIMESTAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_UNSIGNED = "UNSIGNED-PAYLOAD"
_SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
_PAYLOAD = re.compile(rf"[0-9a-f]{{64}}|{_UNSIGNED}|STREAMING-{_UNSIGNED}-TRAILER|{_SIGNED_CHUNKS}(-TRAILER)?")
_ORIGIN = "http://localhost"
# moto's server keeps the spelling of metadata with underscores here, which WSGI cannot tell from dashes.
_SPELLING = "moto.preserved_header_names"
# Sub-resources that are newer than version 2, which does not sign them.
SUBRESOURCES = {
    "abac", "annotation", "attributes", "encryption", "intelligent-tiering", "legal-hold", "metadataAnnotationTable",
    "metadataConfiguration", "metadataInventoryTable", "metadataJournalTable", "metadataTable", "ownershipControls",
    "policyStatus", "publicAccessBlock", "renameObject", "retention", "session",
}  # fmt: skip

_HEADER = "AuthorizationHeaderMalformed"
_QUERY = "AuthorizationQueryParametersError"
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}


class SignatureError(Exception):
    """The request is not signed as it must be; `code` is S3's name for that, `status` the answer's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> str:
        return "403 Forbidden" if self.code in _FORBIDDEN else "400 Bad Request"


class ChunkSigner:
    """Checks the signatures inside a body: each covers its chunk and the signature before it."""

    def __init__(self, signer: SigV4Auth, request: AWSRequest, seed: str, *, trailer: bool) -> None:
        self._signer, self._request, self._previous = signer, request, seed
        self.trailer = trailer

    def check_chunk(self, sha256: str, signature: str) -> bool:
        good = self._check("PAYLOAD", [EMPTY_SHA256_HASH, sha256], signature)
        self._previous = signature
        return good

    def check_trailer(self, sha256: str, signature: str) -> bool:
        return self._check("TRAILER", [sha256], signature)

    def _check(self, kind: str, hashes: list[str], signature: str) -> bool:
        scope = self._signer.credential_scope(self._request)
        moment = self._request.context["timestamp"]
        text = "\n".join([f"AWS4-HMAC-SHA256-{kind}", moment, scope, self._previous, *hashes])
        return same(self._signer.signature(text, self._request), signature)


@dataclass(frozen=True)
class Signed:
    """What a request is signed for."""

    service: str
    region: str = field(default="us-east-1", compare=False)
    chunk_signer: ChunkSigner | None = None


def check(environ: Environ, access_key: str, secret_key: str, now: datetime, body: Callable[[], bytes]) -> Signed:
    """Hold a request's signature against the secret key; `body` is asked for the bytes of what S3 does not get.

    :raises SignatureError: if there is no signature, another one, or one that is too old.
    """
    uri = str(environ["RAW_URI"])
    if not uri.startswith("/") or "#" in uri:  # a fragment would be outside the signature
        raise SignatureError("InvalidURI", "The address cannot be parsed")
    query = parse_qs(uri.partition("?")[2], keep_blank_values=True)
    scheme, _, claim = _header(environ, "authorization").partition(" ")
    credentials = Credentials(access_key, secret_key)
    if scheme == "AWS4-HMAC-SHA256":
        fields = dict(_pairs(claim))
        if fields.keys() != {"Credential", "SignedHeaders", "Signature"}:
            raise SignatureError(_HEADER, "Credential, SignedHeaders and Signature are needed, once each")
        return _check_v4(environ, credentials, fields, _date(environ, now), body, None)
    if scheme == "AWS":
        key, _, signature = claim.strip().rpartition(":")
        _date(environ, now)
        signed_date = "" if "HTTP_X_AMZ_DATE" in environ else _header(environ, "date")
        return _check_v2(environ, credentials, key, signature, signed_date, {})
    if scheme:
        raise SignatureError("InvalidArgument", "This type of authorization is not supported")
    if {"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature"} & query.keys():
        fields = _link_fields(query)
        return _check_v4(environ, credentials, fields, _link_date(fields, now), body, query)
    if "AWSAccessKeyId" in query:
        values = [query.get(name, []) for name in ("AWSAccessKeyId", "Signature", "Expires")]
        if any(len(value) != 1 for value in values) or not re.fullmatch(r"[0-9]{1,12}", values[2][0]):
            raise SignatureError("AccessDenied", "A signed link needs AWSAccessKeyId, Signature and Expires, once each")
        (key,), (signature,), (expires,) = values
        if int(expires) < now.timestamp():
            raise SignatureError("AccessDenied", "Request has expired")
        return _check_v2(environ, credentials, key, signature, expires, query)
    raise SignatureError("AccessDenied", "The request is not signed")


def same(signature: str, given: str) -> bool:
    """Compare two signatures in a time that tells nothing about them."""
    return hmac.compare_digest(signature.encode(), given.encode())


def open_scope(credential: str, access_key: str, timestamp: str, code: str) -> tuple[str, str]:
    """Check a version 4 credential; its region and its service.

    :raises SignatureError: with `code` if it is malformed or of another day than the timestamp.
    """
    parts = credential.rsplit("/", 4)
    if len(parts) != 5 or parts[4] != "aws4_request":
        raise SignatureError(code, "The credential must be KEY/DATE/REGION/SERVICE/aws4_request")
    key, day, region, service, _ = parts
    if key != access_key:
        raise SignatureError("InvalidAccessKeyId", "The access key is not this stack's")
    if day != timestamp[:8]:
        raise SignatureError(code, "The credential's date is not the date of the signature")
    return region, service


def parse_date(text: str) -> datetime | None:
    """Parse the two forms of date that signed requests have."""
    try:
        found = datetime.fromisoformat(text) if _TIMESTAMP.fullmatch(text) else parsedate_to_datetime(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (OverflowError, ValueError):
        return None


class _Signer(SigV4Auth):
    """Signs those headers that a request names, and the payload that the check found."""

    def headers_to_sign(self, request: AWSRequest) -> HTTPMessage:
        return request.headers

    def payload(self, request: AWSRequest) -> str:
        return str(request.context["payload"])

    def _header_value(self, value: str) -> str:
        # Bytes know ASCII's spaces only; AWS leaves those of other scripts alone.
        return b" ".join(value.encode().split()).decode()


class _S3Signer(_Signer, S3SigV4Auth):
    """Takes the path as it is."""


class _OlderSigner(HmacV1Auth):
    """Signs the date that a request names."""

    def __init__(self, credentials: Credentials, date: str) -> None:
        super().__init__(credentials)
        self._date = date

    def _get_date(self) -> str:
        return self._date


def _check_v4(
    environ: Environ,
    credentials: Credentials,
    fields: dict[str, str],
    date: datetime,
    body: Callable[[], bytes],
    query: dict[str, list[str]] | None,
) -> Signed:
    code = _HEADER if query is None else _QUERY
    timestamp = date.strftime(SIGV4_TIMESTAMP)
    region, service = open_scope(fields["Credential"], credentials.access_key, timestamp, code)
    names = dict.fromkeys(fields["SignedHeaders"].lower().split(";"))
    if "host" not in names:
        raise SignatureError(code, "The host header must be signed")
    payload = _payload(environ, names, query) if service == "s3" else hashlib.sha256(body()).hexdigest()
    if service != "s3" and _header(environ, "x-amz-content-sha256") not in {"", payload}:
        raise SignatureError("SignatureDoesNotMatch", "The body is not what was signed")
    sent = {variable: _spelling(environ, variable) for variable in environ if variable.startswith("HTTP_X_AMZ_")}
    free = {"x-amz-content-sha256"} if query is not None else set()  # S3 lets a link's user add it
    if not names.keys() | free >= set(sent.values()):
        raise SignatureError("AccessDenied", "There were headers present in the request which were not signed")
    signed = {name: _header(environ, name) for name in names if sent.get(_variable(name), name) == name}
    request = AWSRequest(environ["REQUEST_METHOD"], headers=signed)
    request.context.update(timestamp=timestamp, payload=payload)
    signer = (_S3Signer if service == "s3" else _Signer)(credentials, service, region)
    for uri in _spellings(environ, signature="X-Amz-Signature"):
        request.url = _ORIGIN + uri
        text = signer.string_to_sign(request, signer.canonical_request(request))
        if same(signer.signature(text, request), fields["Signature"]):
            if not payload.startswith(_SIGNED_CHUNKS):
                return Signed(service, region)
            trailer = payload.endswith("-TRAILER")
            return Signed(service, region, ChunkSigner(signer, request, fields["Signature"], trailer=trailer))
    raise _mismatch()


def _check_v2(
    environ: Environ, credentials: Credentials, key: str, signature: str, date: str, query: dict[str, list[str]]
) -> Signed:
    if key != credentials.access_key:
        raise SignatureError("InvalidAccessKeyId", "The access key is not this stack's")
    if _header(environ, "x-amz-content-sha256").startswith(_SIGNED_CHUNKS):
        raise SignatureError("InvalidArgument", "Signed chunks need a signature of version 4")
    unsigned = SUBRESOURCES & parse_qs(str(environ["RAW_URI"]).partition("?")[2], keep_blank_values=True).keys()
    if unsigned:
        message = f"A signature of version 2 does not cover {min(unsigned)}; sign with version 4"
        raise SignatureError("InvalidRequest", message)
    headers: Any = HTTPHeaders()
    for variable in [*filter(lambda name: name.startswith("HTTP_X_AMZ_"), environ), "CONTENT_TYPE", "HTTP_CONTENT_MD5"]:
        name = _spelling(environ, variable)
        if variable in environ:
            headers[name] = _header(environ, name)
    for name, values in query.items():
        # botocore puts the headers that it signed into the link, and its users need not send them.
        if name.startswith(("x-amz-", "content-")) and name not in headers:
            headers[name] = values[0]
    signer = _OlderSigner(credentials, date)
    for uri in _spellings(environ):
        split = urlsplit(_ORIGIN + uri)
        # A bucket's path is signed with a slash at its end, whether or not it is sent.
        for path in dict.fromkeys((split.path, split.path if "/" in split.path[1:] else f"{split.path}/")):
            text = signer.canonical_string(environ["REQUEST_METHOD"], split, headers, auth_path=path)
            if same(signer.sign_string(text), signature):
                return Signed("s3")
    raise _mismatch()


def _mismatch() -> SignatureError:
    return SignatureError("SignatureDoesNotMatch", "The signature is not that of this request with this stack's key")


def _pairs(claim: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for part in claim.split(","):
        name, _, value = part.strip().partition("=")
        if name in seen:
            raise SignatureError(_HEADER, f"{name} is there twice")
        seen.add(name)
        yield name, value


def _date(environ: Environ, now: datetime) -> datetime:
    found = parse_date(_header(environ, "x-amz-date") or _header(environ, "date"))
    if found is None:
        raise SignatureError("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    if abs(now - found) > _SKEW:
        raise SignatureError("RequestTimeTooSkewed", "The request's time is too far from this machine's")
    return found


def _link_fields(query: dict[str, list[str]]) -> dict[str, str]:
    fields = {}
    for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature"):
        values = query.get(f"X-Amz-{name}", [])
        if len(values) != 1:
            raise SignatureError(_QUERY, f"A signed link needs X-Amz-{name}, once")
        fields[name] = values[0]
    if fields["Algorithm"] != "AWS4-HMAC-SHA256":
        raise SignatureError(_QUERY, "X-Amz-Algorithm must be AWS4-HMAC-SHA256")
    return fields


def _link_date(fields: dict[str, str], now: datetime) -> datetime:
    date = parse_date(fields["Date"]) if _TIMESTAMP.fullmatch(fields["Date"]) else None
    if date is None:
        raise SignatureError(_QUERY, "X-Amz-Date must be like 20260131T235959Z")
    if not re.fullmatch(r"[0-9]{1,12}", fields["Expires"]):
        raise SignatureError(_QUERY, "X-Amz-Expires must be a number of seconds")
    if int(fields["Expires"]) > _WEEK:
        raise SignatureError(_QUERY, f"X-Amz-Expires must be at most a week, {_WEEK} seconds")
    if now - date > timedelta(seconds=int(fields["Expires"])):
        raise SignatureError("AccessDenied", "Request has expired")
    if date - now > _SKEW:
        raise SignatureError("AccessDenied", "Request is not yet valid")
    return date


def _payload(environ: Environ, names: dict[str, None], query: dict[str, list[str]] | None) -> str:
    """What a request to S3 says of its body, and signs."""
    given = _header(environ, "x-amz-content-sha256")
    if query is None and not given:
        raise SignatureError("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    if given and not _PAYLOAD.fullmatch(given):
        raise SignatureError("InvalidArgument", "x-amz-content-sha256 must be a SHA-256 or one of S3's words")
    if query is None or "x-amz-content-sha256" in names:
        return given
    # Some clients say it in the link, where nothing would hold a body against a hash.
    if query.get("X-Amz-Content-Sha256", [_UNSIGNED]) != [_UNSIGNED]:
        raise SignatureError(_QUERY, f"X-Amz-Content-Sha256 of a link must be {_UNSIGNED}")
    return _UNSIGNED


def _variable(name: str) -> str:
    variable = name.upper().replace("-", "_")
    return variable if variable in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{variable}"


def _spelling(environ: Environ, variable: str) -> str:
    """The name of a header as it was sent, in small letters."""
    spelling: dict[str, str] = environ.get(_SPELLING, {})
    return spelling.get(variable, variable.removeprefix("HTTP_").replace("_", "-")).lower()


def _header(environ: Environ, name: str) -> str:
    value = str(environ.get(_variable(name), ""))
    try:
        return value.encode("latin-1").decode()  # WSGI shows the bytes on the wire as Latin-1
    except UnicodeError:
        return value


def _spellings(environ: Environ, signature: str = "") -> Iterator[str]:
    """The path and query as they came, and as AWS writes them; without the signature itself."""
    uri = str(environ["RAW_URI"])
    path, _, query = uri.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    # Version 2 has no `=` where there is no value; version 4 always has one, wherever it is sent.
    clean = [(_encoded(name), mark if value else "", _encoded(value)) for name, mark, value in pairs]
    for place, found in ((path, pairs), (quote(unquote_to_bytes(path), safe="/"), clean)):
        yield f"{place}?" + "&".join("".join(pair) for pair in found if pair[0] != signature)


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text.replace("+", " ")), safe="")
