"""The two classes of moto that hold bytes: an object and an upload in parts, with stored bodies instead of memory.

Everything else of moto is as it is, but for the encoding of a list of versions. All are put where moto looks for its
own; that, and the attributes that are saved, is why moto is pinned below its next minor version.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import moto.core.common_models
import moto.s3.models
from moto.s3.exceptions import EntityTooSmall, InvalidPart, MalformedXML
from moto.s3.responses import S3Response

from dropforge.stack.bodies import Bodies, Checksum, Content, Piece, Spool

ACCOUNT = "123456789012"  # moto's, whatever the access key
REGION = "us-east-1"

# Typed, but not to be put other classes in.
models: Any = moto.s3.models

_PART_MINIMUM = 5 << 20
_COMPUTED = ("crc32", "sha1", "sha256")


class Request:
    """What the calling thread brings along for moto: bytes that came, and digests that were computed beforehand."""

    _running = threading.local()

    def __init__(self, bodies: Bodies, body: Spool | None = None) -> None:
        self.bodies, self._body = bodies, body
        self.md5s: dict[tuple[Piece, ...], str] = {}
        self._spools: list[Spool] = [body] if body else []

    @classmethod
    def current(cls) -> Request:
        found: Request = cls._running.request
        return found

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The thread works on this request; bytes that nothing names afterwards are thrown away."""
        Request._running.request = self
        try:
            yield
        finally:
            del Request._running.request
            for spool in self._spools:
                self.bodies.settle(spool)

    def take_body(self, value: bytes) -> Spool:
        """The bytes that were read before moto was asked, for which it was given none; else what moto gives."""
        body = self._body
        if body is not None and not value:
            self._body = None
        else:  # such as a form's file, or a line of an access log
            body = self.bodies.spool()
            self._spools.append(body)
            body.write(value)
        body.finish()
        self.bodies.add(body)
        return body


class StoredObject(models.FakeKey):  # type: ignore[misc]
    """An object's version, or a part of an upload (then `name` is its number), whose bytes are pieces of bodies."""

    pieces: tuple[Piece, ...]
    digests: dict[str, bytes]
    contentsize: int
    _etag: str | None

    @property
    def value(self) -> bytes | Content:
        return Request.current().bodies.read(self.pieces)

    @value.setter
    def value(self, value: bytes | str | Content) -> None:
        if "_value_buffer" in self.__dict__:  # moto has just opened a file for the bytes
            self.__dict__.pop("_value_buffer").close()
        if isinstance(value, Content):
            self._set(value.pieces, {})
            return
        spool = Request.current().take_body(value.encode() if isinstance(value, str) else value)
        self._set(spool.pieces, spool.digests())

    def _set(self, pieces: tuple[Piece, ...], digests: dict[str, bytes]) -> None:
        self.pieces, self.digests = pieces, digests
        self.contentsize = sum(piece.size for piece in pieces)
        if self._etag is None:
            self._etag = Request.current().md5s.get(pieces) or self.digest("md5").hex()

    def digest(self, name: str) -> bytes:
        """The checksum of the bytes: as it was computed when they came, else by reading them."""
        found = self.digests.get(name)
        if found is None:
            found = self.digests[name] = Request.current().bodies.digest(name, self.pieces)
        return found

    @property
    def etag(self) -> str:
        return f'"{self._etag}"'

    def dispose(self, garbage: bool = False) -> None:
        """Do nothing: a body goes when nothing names it any more."""

    def __del__(self) -> None:
        pass

    def __deepcopy__(self, _: object) -> StoredObject:
        # moto copies every version to list some of them; what it changes is on the surface.
        twin: StoredObject = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_of_nothing(type(self)) | state)


class StoredUpload(models.FakeMultipart):  # type: ignore[misc]
    """An upload in parts. Completing it moves no bytes: the object names the pieces of its parts."""

    def complete(self, body: Iterator[tuple[int, str]]) -> tuple[Content, str, tuple[str, str, int] | None]:
        parts: list[StoredObject] = []
        for number, tag in body:
            part: StoredObject | None = self.parts.get(number)
            if part is None or part.etag.strip('"') != tag.strip('"'):
                raise InvalidPart
            if parts and parts[-1].contentsize < _PART_MINIMUM:
                raise EntityTooSmall
            parts.append(part)
        if not parts:
            raise MalformedXML
        tags = Checksum("md5")
        for part in parts:
            tags.update(bytes.fromhex(part.etag.strip('"')))
        pieces = tuple(piece for part in parts for piece in part.pieces)
        content = Content(Request.current().bodies, pieces)
        return content, f"{tags.digest().hex()}-{len(parts)}", self._checksum(parts, pieces)

    def _checksum(self, parts: list[StoredObject], pieces: tuple[Piece, ...]) -> tuple[str, str, int] | None:
        """Type, value and count as moto keeps them; of those that take long to compute, none is shown."""
        name = str(self.metadata.get("x-amz-checksum-algorithm") or "").lower()
        if name not in _COMPUTED:
            return None
        kind = self.metadata.get("x-amz-checksum-type") or "COMPOSITE"
        if kind != "COMPOSITE":
            return kind, base64.b64encode(Request.current().bodies.digest(name, pieces)).decode(), 1
        checksum = Checksum(name)
        for part in parts:
            checksum.update(part.digest(name))
        return kind, base64.b64encode(checksum.digest()).decode(), len(parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_of_nothing(type(self)) | state)


_examples: dict[type, dict[str, Any]] = {}


def _of_nothing(kind: type) -> dict[str, Any]:
    """The attributes that a new one has: a later moto may know more of them than the one that saved."""
    if kind not in _examples:
        if kind is StoredUpload:
            made = StoredUpload("", {}, account_id=ACCOUNT, region_name=REGION)
        else:
            empty = Content(Request.current().bodies, ())
            made = StoredObject("", empty, account_id=ACCOUNT, region_name=REGION, etag="")
        _examples[kind] = {name: value for name, value in vars(made).items() if name != "lock"}
    return copy.copy(_examples[kind])


_list_versions: Any = S3Response.list_object_versions


def _list_encoded_versions(response: Any) -> Any:
    """List versions in the encoding that a client asks for: a key may have characters that XML cannot have."""
    serialized = response.serialized
    if response.querystring.get("encoding-type") == ["url"]:
        response.serialized = lambda found: serialized(_encode(found))
    return _list_versions(response)


def _encode(found: Any) -> Any:
    result = found.result
    if not isinstance(result, dict):  # a refusal
        return found
    result["EncodingType"] = "url"
    named = [result, *result["Versions"], *result["DeleteMarkers"], *result.get("CommonPrefixes", [])]
    for names in named:
        for name in {"Key", "KeyMarker", "NextKeyMarker", "Prefix", "Delimiter"} & names.keys():
            names[name] = names[name] and quote(names[name])
    return found


def install() -> None:
    """Put our classes where moto looks for its own."""
    # moto remembers every object it ever made, to warn about leaks in tests; that is a leak here.
    base: Any = moto.core.common_models.BaseModel
    base.__new__ = staticmethod(lambda cls, *_args, **_kwargs: object.__new__(cls))
    models.FakeKey = StoredObject
    models.FakeMultipart = StoredUpload
    response: Any = S3Response
    response.list_object_versions = _list_encoded_versions
