"""Lines of a packed text that strangers may have written: a piece at a time, and no more than a bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

_GZIP: Final = 31  # zlib's number for gzip's format
_CHUNK: Final = 64 << 10


class NoTextError(ValueError):
    """It is not gzip's format, or is broken."""


class LongTextError(ValueError):
    """There is more of it."""


def lines(stream: BinaryIO, most: int) -> Iterator[bytes]:
    """Lines of a gzip stream, without their ends.

    :param most: bytes of text that are unpacked, and packed ones that are read; the last line may be cut there.
    :raises NoTextError, LongTextError: behind the lines that there are before.
    """
    parts: list[bytes] = []
    try:
        for piece in _texts(stream, most):
            first, *others = piece.split(b"\n")
            parts.append(first)
            for other in others:
                yield b"".join(parts)
                parts = [other]
    except (NoTextError, LongTextError):
        yield from _rest(parts)
        raise
    yield from _rest(parts)


def _rest(parts: list[bytes]) -> Iterator[bytes]:
    if line := b"".join(parts):
        yield line


def _texts(stream: BinaryIO, most: int) -> Iterator[bytes]:
    unpack, packed, text = zlib.decompressobj(_GZIP), 0, 0
    data = b""
    try:
        while True:
            if not data:
                data = stream.read(_CHUNK)
                packed += len(data)
                if not data:
                    break
                if unpack.eof:  # several files of gzip in a row are one
                    unpack = zlib.decompressobj(_GZIP)
            piece = unpack.decompress(data, min(_CHUNK, most + 1 - text))
            data = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
            if unpack.eof and data:
                unpack = zlib.decompressobj(_GZIP)
            text += len(piece)
            yield piece[: len(piece) - max(0, text - most)]
            if text > most or packed > most + _CHUNK:
                raise LongTextError(f"it has more than {most >> 20} MiB")
    except zlib.error as error:
        raise NoTextError(str(error)) from None
    if not unpack.eof:
        raise NoTextError("it ends too early")
