"""A request's bytes on their way into a spool: lengths and checksums are held against what the client promised.

moto is given an empty body: it would keep several copies of the bytes in memory and believes every checksum.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from dropforge.stack.bodies import Spool
from dropforge.stack.signatures import ChunkSigner

_BLOCK = 1 << 18
_LINE = 16 << 10
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(;[^\r\n]*)?\r\n")
_HEX = re.compile(r"[0-9a-f]{64}")
_CHECKSUMS = {"crc32": "CRC32", "sha1": "SHA1", "sha256": "SHA256", "crc32c": "CRC32C", "crc64nvme": "CRC64NVME"}


class BodyError(Exception):
    """The bytes are not what the request says they are; `code` is S3's name for that."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class RequestTimeoutError(BodyError, TimeoutError):
    """The client has stopped sending."""

    def __init__(self) -> None:
        BodyError.__init__(self, "RequestTimeout", "Nothing came from the client for too long")


def wanted_digests(environ: dict[str, Any]) -> tuple[str, ...]:
    """The checksums that reading this request must compute."""
    names = {"md5"}
    if _HEX.fullmatch(environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")):
        names.add("sha256")
    asked = " ".join(
        environ.get(name, "").lower() for name in ("HTTP_X_AMZ_TRAILER", "HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM")
    )
    for name in _CHECKSUMS:
        if f"HTTP_X_AMZ_CHECKSUM_{name.upper()}" in environ or re.search(rf"\b{name}\b", asked):
            names.add(name)
    return tuple(sorted(names))


def read_body(environ: dict[str, Any], spool: Spool, chunk_signer: ChunkSigner | None = None) -> None:
    """Read the whole body into the spool and leave `environ` as if the request had none.

    :raises BodyError: if bytes are missing, or a checksum or a chunk's signature differs.
    :raises OSError: if the disk is full.
    """
    promised = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH")
    if promised is not None and not re.fullmatch("[0-9]{1,15}", promised):
        raise BodyError("InvalidRequest", "x-amz-decoded-content-length must be a number of bytes")
    trailers: dict[str, str] = {}
    payload = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if payload.startswith("STREAMING-") and promised is None:
        raise BodyError("MissingContentLength", "An upload in S3's chunks needs x-amz-decoded-content-length")
    if payload.startswith("STREAMING-AWS4-") and chunk_signer is None:
        raise BodyError("SignatureDoesNotMatch", "the upload's chunks are signed, but their request is not")
    blocks = _plain(environ)
    for block in _decode(_Lines(blocks), trailers, chunk_signer) if payload.startswith("STREAMING-") else blocks:
        spool.write(block)
        if promised is not None and spool.size > int(promised):
            raise BodyError("IncompleteBody", f"{promised} bytes were promised and more came")
    if promised is not None and spool.size != int(promised):
        raise BodyError("IncompleteBody", f"{promised} bytes were promised and {spool.size} came")
    announced = {name.strip().lower() for name in environ.get("HTTP_X_AMZ_TRAILER", "").split(",") if name.strip()}
    checksums = {name: value for name, value in trailers.items() if name.startswith("x-amz-checksum-")}
    if not checksums.keys() <= announced <= trailers.keys():
        raise BodyError("MalformedTrailerError", "what follows the upload's last chunk is not what x-amz-trailer says")
    for name, value in checksums.items():
        environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    spool.finish()
    check_digests(environ, spool.digest)
    environ["CONTENT_LENGTH"] = "0"
    for name in ("HTTP_X_AMZ_CONTENT_SHA256", "HTTP_TRANSFER_ENCODING", "HTTP_CONTENT_MD5"):
        environ.pop(name, None)


def _plain(environ: dict[str, Any]) -> Iterator[bytes]:
    stream: BinaryIO = environ["wsgi.input"]
    transfer = environ.get("HTTP_TRANSFER_ENCODING")
    if transfer is None:
        return read_blocks(stream, int(environ.get("CONTENT_LENGTH") or 0))
    # S3 must know how much is to come; SDKs that sum what they send tell it in this header.
    if transfer.lower() != "chunked" or "HTTP_X_AMZ_DECODED_CONTENT_LENGTH" not in environ:
        raise BodyError("MissingContentLength", "An upload needs a Content-Length or x-amz-decoded-content-length")
    return _dechunk(stream)


def read_blocks(stream: BinaryIO, count: int) -> Iterator[bytes]:
    """Read exactly so many bytes."""
    while count > 0:
        block = stream.read(min(_BLOCK, count))
        if not block:
            raise BodyError("IncompleteBody", f"the upload ended {count} bytes too early")
        count -= len(block)
        yield block


def _dechunk(stream: BinaryIO) -> Iterator[bytes]:
    """Undo HTTP's chunked transfer; what a client sends after the last chunk is read and left out."""
    size = -1
    while size:
        line = _SIZE_LINE.fullmatch(stream.readline(_LINE))
        if line is None:
            raise BodyError("IncompleteBody", "the transfer's chunks are broken")
        size = int(line[1], 16)
        yield from read_blocks(stream, size)
        if size and stream.read(2) != b"\r\n":
            raise BodyError("IncompleteBody", "the transfer's chunks are broken")
    room = _LINE
    while (trailer := stream.readline(room)) != b"\r\n":
        room -= len(trailer)
        if not trailer.endswith(b"\r\n") or room <= 0:
            raise BodyError("IncompleteBody", "the transfer's chunks are broken")


class _Lines:
    """A stream of blocks, read by line or by count."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest, self._at = blocks, b"", 0

    def line(self, *, last: bool = False) -> bytes:
        """Read up to the end of a line; where it is the `last`, the end of the stream will do."""
        while (end := self._rest.find(b"\r\n", self._at)) < 0:
            self._rest, self._at = self._rest[self._at :], 0
            block = next(self._blocks, b"")
            if last and not block:
                end = len(self._rest)
                break
            if not block or len(self._rest) > _LINE:
                raise BodyError("IncompleteBody", "the upload's chunks are broken")
            self._rest += block
        line = self._rest[self._at : end]
        self._at = end + 2
        return line

    def take(self, count: int) -> Iterator[bytes]:
        while count:
            if self._at >= len(self._rest):
                self._rest, self._at = next(self._blocks, b""), 0
            block = self._rest[self._at : self._at + count]
            if not block:
                raise BodyError("IncompleteBody", f"the upload ended {count} bytes too early")
            self._at += len(block)
            count -= len(block)
            yield block


def _decode(lines: _Lines, trailers: dict[str, str], signer: ChunkSigner | None) -> Iterator[bytes]:
    """Undo S3's `aws-chunked` encoding; what follows the last chunk goes to `trailers`.

    A chunk is given away before its signature is checked: whoever takes it throws it away after an error.
    """
    size = -1
    while size:
        digits, _, extension = lines.line().partition(b";")
        if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", digits):
            raise BodyError("IncompleteBody", "the upload's chunks are broken")
        size = int(digits, 16)
        digest = hashlib.sha256()
        for block in lines.take(size):
            if signer is not None:
                digest.update(block)
            yield block
        name, _, signature = extension.decode("latin-1").strip().partition("=")
        if signer is not None and not (name == "chunk-signature" and signer.check_chunk(digest.hexdigest(), signature)):
            raise BodyError("SignatureDoesNotMatch", "a chunk of the upload is not what was signed")
        if size and lines.line():
            raise BodyError("IncompleteBody", "the upload's chunks are broken")
    found = _read_trailers(lines)
    if signer is not None:
        signature = found.pop("x-amz-trailer-signature", "")
        text = "".join(f"{name}:{value}\n" for name, value in sorted(found.items()))
        sha256 = hashlib.sha256(text.encode("latin-1")).hexdigest()
        if not signer.check_trailer(sha256, signature) if signer.trailer else found:
            raise BodyError("SignatureDoesNotMatch", "what follows the upload's last chunk is not what was signed")
    trailers.update(found)


def _read_trailers(lines: _Lines) -> dict[str, str]:
    found: dict[str, str] = {}
    room = _LINE
    while line := lines.line(last=True):  # the empty line at the end is left out by some clients
        name, _, value = line.decode("latin-1").partition(":")
        name, room = name.strip().lower(), room - len(line)
        if room < 0 or name in found:
            raise BodyError("MalformedTrailerError", "the upload's trailer is too long, or says something twice")
        found[name] = value.strip()
    return found


def check_digests(environ: dict[str, Any], digest: Callable[[str], bytes]) -> None:
    """Hold a request's checksums against those of its bytes, which `digest` gives by name.

    :raises BodyError: if one differs.
    """
    content_md5 = environ.get("HTTP_CONTENT_MD5")
    if content_md5 and decode_checksum(content_md5) != digest("md5"):
        raise BodyError("BadDigest", "the bytes that came have another MD5 than Content-MD5 says")
    signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if _HEX.fullmatch(signed) and bytes.fromhex(signed) != digest("sha256"):
        raise BodyError("XAmzContentSHA256Mismatch", "the bytes that came have another SHA-256 than was signed")
    algorithm = environ.pop("HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM", "").lower()
    for name, official in _CHECKSUMS.items():
        header = f"HTTP_X_AMZ_CHECKSUM_{name.upper()}"
        value = environ.get(header)
        if value is None and name == algorithm:
            value = environ[header] = base64.b64encode(digest(name)).decode()
        if value is None:
            continue
        if decode_checksum(value) != digest(name):
            raise BodyError("BadDigest", f"the bytes that came have another {official} than the client says")
        # moto keeps a checksum only if this header names it.
        environ["HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM"] = official


def decode_checksum(value: str) -> bytes | None:
    """The bytes of a base64 checksum header; None if it is none."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
