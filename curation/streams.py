"""Bytes of a file, decompressed in bounded steps.

gzip is read member by member and zstd frame by frame. A file that ends in the middle, is damaged, or expands beyond
the limits ends its stream with `TornError`: what came before it has been handed out, what comes after is lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal

import zstandard

from curation.reasons import Reason

Compression = Literal["none", "gzip", "zstd"]

STEP: Final = 1 << 20
# One zstd block of 4 bytes can stand for 128 KiB, so compressed bytes are fed in small pieces: at most 33 MB each.
_ZSTD_FEED: Final = 1 << 10
_ZSTD_WINDOW: Final = 1 << 27


class TornError(Exception):
    """The stream ends here for a cause that is not its end."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Limits:
    """How far one file may expand: `ratio` counts only beyond `free` bytes, `total` always (bytes, decompressed).

    A record costs more than its bytes, and none that differs from its neighbours packs into less than a byte: beyond
    `rows` records there may be one for each compressed byte.
    """

    ratio: int = 250
    free: int = 64 << 20
    total: int = 1 << 40
    rows: int = 1 << 20

    def check(self, produced: int, size: int) -> None:
        """:raises TornError: if `produced` bytes are too many for a file of `size` bytes."""
        if produced > self.total or (produced > self.free and produced > self.ratio * max(1, size)):
            raise TornError(Reason.BOMB, f"{size} bytes expand to more than {produced}")


DEFAULT_LIMITS: Final = Limits()


def chunks(stream: BinaryIO, compression: Compression, size: int, limits: Limits = DEFAULT_LIMITS) -> Iterator[bytes]:
    """Decompressed pieces of a stream.

    :param size: the file's compressed size in bytes, for the ratio.
    :raises TornError: at the place where the stream cannot be followed any more.
    """
    source = {"none": _plain, "gzip": _gzip, "zstd": _zstd}[compression](stream)
    produced = 0
    for whole in source:
        # Small steps, so that rows before the limit come out even of a piece that bursts it.
        for start in range(0, len(whole), STEP):
            piece = whole[start : start + STEP]
            produced += len(piece)
            if compression != "none":
                limits.check(produced, size)
            yield piece


def _plain(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(STEP):
        yield piece


def _gzip(stream: BinaryIO) -> Iterator[bytes]:
    pending = stream.read(1 << 16)
    while pending:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                piece = member.decompress(pending, STEP)
            except zlib.error as error:
                raise TornError(Reason.TORN_FILE, f"the gzip data is damaged ({error})") from None
            if piece:
                yield piece
            pending = member.unconsumed_tail
            if not pending and not member.eof and len(piece) < STEP:
                pending = stream.read(1 << 16)
                if not pending:
                    raise TornError(Reason.TORN_FILE, "the gzip data ends before its end")
        pending = member.unused_data or stream.read(1 << 16)
        # Padding with zeros is allowed after a member; anything else must be another member.
        while pending and not pending.strip(b"\0"):
            pending = stream.read(1 << 16)
        if pending[:1] == b"\0":
            pending = pending.lstrip(b"\0")
        if pending and pending[:1] != b"\x1f":
            raise TornError(Reason.TORN_FILE, "there is something else behind the gzip data")


def _zstd(stream: BinaryIO) -> Iterator[bytes]:
    pending = stream.read(_ZSTD_FEED)
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)  # to make one takes longer than a small frame
    while pending:
        frame = reader.decompressobj()
        held: list[bytes] = []
        size = 0
        while not frame.eof:
            try:
                piece = frame.decompress(pending)
            except zstandard.ZstdError as error:
                if held:
                    yield b"".join(held)
                raise TornError(Reason.TORN_FILE, f"the zstd data is damaged ({error})") from None
            held.append(piece)
            size += len(piece)
            if size >= STEP:
                yield b"".join(held)
                held, size = [], 0
            if not frame.eof:
                pending = stream.read(_ZSTD_FEED)
                if not pending:
                    if held:
                        yield b"".join(held)
                    raise TornError(Reason.TORN_FILE, "the zstd data ends before its end")
        if held:
            yield b"".join(held)
        pending = frame.unused_data or stream.read(_ZSTD_FEED)
