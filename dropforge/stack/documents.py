"""Documents that moto is to see whole: XML, JSON and forms. They are read and checked before its turn.

What only costs time or fails in moto (entities, depth, long lists) is refused here, where nobody waits for it.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from typing import Any
from xml.parsers import expat

from dropforge.stack.bodies import Checksum
from dropforge.stack.body import BodyError, check_digests, read_blocks

_DEPTH = 32
_ELEMENTS = 100_000  # an upload of 10,000 parts, each with its checksums, has fewer
_CONDITIONS = {"ETag", "LastModifiedTime", "Size"}  # of a key to delete
_MOST = {"Object": 1000, "Part": 10_000}  # S3's own bounds: keys to delete, parts of an upload


def no_body(environ: dict[str, Any]) -> None:
    """Leave unread what a request has sent for nothing."""
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(), "0"
    environ.pop("HTTP_TRANSFER_ENCODING", None)


def read_start(environ: dict[str, Any], count: int, limit: int) -> bytes:
    """Read the first bytes of a document, at most `count`, for `read_document` to go on from."""
    return b"".join(read_blocks(environ["wsgi.input"], min(_document_length(environ, limit), count)))


def read_document(environ: dict[str, Any], limit: int, start: bytes = b"") -> bytes:
    """Read a body that moto is to see (a list of parts or keys, a form) before its turn; it can be read again."""
    length = _document_length(environ, limit)
    data = b"".join([start, *read_blocks(environ["wsgi.input"], length - len(start))])
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = _Whole(data), str(length)
    environ["wsgi.input_terminated"] = True  # so it is read as it is
    return data


class _Whole(io.BytesIO):
    """Read in one go: where a piece of a form ends inside its boundary, werkzeug adds a byte to the file."""

    def read(self, _: int | None = -1, /) -> bytes:
        return super().read()


def _document_length(environ: dict[str, Any], limit: int) -> int:
    if "HTTP_TRANSFER_ENCODING" in environ:
        raise BodyError("MissingContentLength", "A document needs a Content-Length, and no other transfer")
    if environ.get("HTTP_X_AMZ_CONTENT_SHA256", "").startswith("STREAMING-"):
        # Only the bytes of objects and parts come in signed chunks; here nothing would check those.
        raise BodyError("InvalidRequest", "A document is sent whole: sign its SHA-256 instead of STREAMING-...")
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > limit:
        raise BodyError("EntityTooLarge", f"the request's document is longer than {limit} bytes")
    return length


def check_document(environ: dict[str, Any], data: bytes, *, of_object: bool = False) -> None:
    """Check a document's checksums and that its XML is one that moto reads in little time.

    :param of_object: the checksums in the headers are those of the object that the request completes.
    :raises BodyError: if a checksum differs, or the XML declares entities, is nested too deep, lists too much, or makes
        conditions that moto would pass over.
    """
    told = {name: value for name, value in environ.items() if not of_object or "_CHECKSUM_" not in name}
    check_digests(told, lambda name: _digest(name, data))
    for encoding in (None, "utf-8"):  # as the document says, and as moto reads it
        parser = expat.ParserCreate(encoding)
        limits = _Limits()
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.StartElementHandler, parser.EndElementHandler = limits.start, limits.end
        with contextlib.suppress(expat.ExpatError):  # moto says so, or it is to be no XML
            parser.Parse(data, True)


def _digest(name: str, data: bytes) -> bytes:
    checksum = Checksum(name)
    checksum.update(data)
    return checksum.digest()


def _refuse_declarations(*_: object) -> None:
    raise BodyError("MalformedXML", "The document has a DOCTYPE")


class _Limits:
    """Depth and counts of a document's elements while it is parsed."""

    def __init__(self) -> None:
        self._depth, self._elements = 0, 0
        self._counts: Counter[str] = Counter()
        self._root = ""

    def start(self, name: str, _: dict[str, str]) -> None:
        """:raises BodyError: if the element is one too many."""
        self._depth, self._elements = self._depth + 1, self._elements + 1
        if self._depth > _DEPTH or self._elements > _ELEMENTS:
            raise BodyError(
                "MalformedXML",
                f"The document has more than {_ELEMENTS} elements, or they are nested over {_DEPTH} deep",
            )
        kind = name.rpartition(":")[2]
        if self._depth == 1:
            self._root = kind
        if self._root == "Delete" and kind in _CONDITIONS:  # moto would delete whatever the object is
            raise BodyError(
                "NotImplemented", f"The embedded stack deletes no list of keys by {kind}; delete one by one"
            )
        if kind in _MOST:
            self._counts[kind] += 1
            if self._counts[kind] > _MOST[kind]:
                raise BodyError("MalformedXML", f"The document has more than {_MOST[kind]} elements {kind}")

    def end(self, _: str) -> None:
        self._depth -= 1
