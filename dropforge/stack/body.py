"""A request's bytes on their way into a spool: lengths and checksums are held against what the client promised.

moto is given an empty body: it would keep several copies of the bytes in memory and believes every checksum.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from dropforge.stack.bodies import Spool

_BLOCK = 1 << 18
_LINE = 16 << 10
_HEX = re.compile(r"[0-9a-f]{64}")
_CHECKSUMS = {"crc32": "CRC32", "sha1": "SHA1", "sha256": "SHA256", "crc32c": "CRC32C", "crc64nvme": "CRC64NVME"}
_COMPUTED = ("crc32", "sha1", "sha256")


class BodyError(Exception):
    """The bytes are not what the request says they are; `code` is S3's name for that."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def wanted_digests(environ: dict[str, Any]) -> tuple[str, ...]:
    """The checksums that reading this request must compute."""
    names = {"md5"}
    if _HEX.fullmatch(environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")):
        names.add("sha256")
    asked = " ".join(
        environ.get(name, "").lower() for name in ("HTTP_X_AMZ_TRAILER", "HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM")
    )
    for name in _COMPUTED:
        if f"HTTP_X_AMZ_CHECKSUM_{name.upper()}" in environ or re.search(rf"\b{name}\b", asked):
            names.add(name)
    return tuple(sorted(names))


def read_body(environ: dict[str, Any], spool: Spool) -> None:
    """Read the whole body into the spool and leave `environ` as if the request had none.

    :raises BodyError: if bytes are missing or a checksum differs.
    :raises OSError: if the disk is full.
    """
    trailers: dict[str, str] = {}
    encoded = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "").startswith("STREAMING-")
    blocks = _plain(environ)
    for block in _decode(_Lines(blocks), trailers) if encoded else blocks:
        spool.write(block)
    promised = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH")
    if promised is not None and int(promised) != spool.size:
        raise BodyError("IncompleteBody", f"{promised} bytes were promised and {spool.size} came")
    for name, value in trailers.items():
        environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    spool.finish()
    _check(environ, spool)
    environ["CONTENT_LENGTH"] = "0"
    for name in ("HTTP_X_AMZ_CONTENT_SHA256", "HTTP_TRANSFER_ENCODING", "HTTP_CONTENT_MD5", "wsgi.input_terminated"):
        environ.pop(name, None)


def _plain(environ: dict[str, Any]) -> Iterator[bytes]:
    stream: BinaryIO = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):
        while block := stream.read(_BLOCK):
            yield block
        return
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left:
        block = stream.read(min(_BLOCK, left))
        if not block:
            raise BodyError("IncompleteBody", f"the upload ended {left} bytes too early")
        left -= len(block)
        yield block


class _Lines:
    """A stream of blocks, read by line or by count."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def line(self) -> bytes:
        while b"\r\n" not in self._rest:
            block = next(self._blocks, b"")
            if not block or len(self._rest) > _LINE:
                raise BodyError("IncompleteBody", "the upload's chunks are broken")
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line

    def take(self, count: int) -> Iterator[bytes]:
        while count:
            block = self._rest or next(self._blocks, b"")
            if not block:
                raise BodyError("IncompleteBody", f"the upload ended {count} bytes too early")
            self._rest = block[count:]
            yield block[:count]
            count -= min(count, len(block))


def _decode(lines: _Lines, trailers: dict[str, str]) -> Iterator[bytes]:
    """Undo S3's `aws-chunked` encoding; what follows the last chunk goes to `trailers`."""
    while True:
        size = lines.line().split(b";")[0]
        if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", size):
            raise BodyError("IncompleteBody", "the upload's chunks are broken")
        if not int(size, 16):
            break
        yield from lines.take(int(size, 16))
        lines.line()
    try:
        while line := lines.line():
            name, _, value = line.decode("latin-1").partition(":")
            if name.lower().startswith("x-amz-checksum-"):
                trailers[name.lower()] = value.strip()
    except BodyError:
        pass  # the empty line at the end is left out by some clients


def _check(environ: dict[str, Any], spool: Spool) -> None:
    content_md5 = environ.get("HTTP_CONTENT_MD5")
    if content_md5 and decode_checksum(content_md5) != spool.digest("md5"):
        raise BodyError("BadDigest", "the bytes that came have another MD5 than Content-MD5 says")
    signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if _HEX.fullmatch(signed) and bytes.fromhex(signed) != spool.digest("sha256"):
        raise BodyError("XAmzContentSHA256Mismatch", "the bytes that came have another SHA-256 than was signed")
    algorithm = environ.pop("HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM", "").lower()
    for name, official in _CHECKSUMS.items():
        header = f"HTTP_X_AMZ_CHECKSUM_{name.upper()}"
        value = environ.get(header)
        if value is None and name == algorithm and name in _COMPUTED:
            value = environ[header] = base64.b64encode(spool.digest(name)).decode()
        if value is None:
            continue
        if name in _COMPUTED and decode_checksum(value) != spool.digest(name):
            raise BodyError("BadDigest", f"the bytes that came have another {official} than the client says")
        # moto keeps a checksum only if this header names it.
        environ["HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM"] = official


def decode_checksum(value: str) -> bytes | None:
    """The bytes of a base64 checksum header; None if it is none."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
