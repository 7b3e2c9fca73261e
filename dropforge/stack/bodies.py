"""The bytes of the embedded store's objects: on the disk, never changed, and read only when they are sent.

An object's bytes are a row of pieces, each a range of a stored body. A copy, a completed upload and a part that is
copied from another object name pieces that are there already: none of them moves a byte. A large body is a file of
the folder; a small one lies in the database beside what is known of the object, so that one sync makes both durable.
A body goes when nothing names it any more: no version, no part of an upload, no answer that is still being sent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from dropforge.store import sync_folder

SMALL = 32 << 10
WHOLE = 4 << 20  # moto is given what is not longer as plain bytes
_BLOCK = 1 << 20
_IN_DATABASE = "small-"
_NAME = re.compile("[0-9a-f]{32}")


class Piece(NamedTuple):
    """`size` bytes of a stored body, from byte `start` on."""

    body: str
    start: int
    size: int


class Checksum:
    """A running checksum by S3's name."""

    def __init__(self, name: str) -> None:
        self._crc = 0
        self._hash: Any = None
        if name in ("crc32c", "crc64nvme"):
            from dropforge.stack.crc import Crc  # few clients ask for it, and it needs numpy

            self._hash = Crc(name)
        elif name != "crc32":
            self._hash = hashlib.new(name, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        if self._hash is None:
            self._crc = zlib.crc32(data, self._crc)
        else:
            self._hash.update(data)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big") if self._hash is None else bytes(self._hash.digest())


class Spool:
    """Bytes on their way in: they stay in memory while they are few and go to a file when they are not."""

    def __init__(self, folder: Path, digests: Iterable[str] = ("md5",)) -> None:
        self._name = uuid.uuid4().hex
        self._path = folder / self._name
        self._digests = {name: Checksum(name) for name in digests}
        self._stream: IO[bytes] | None = None
        self.small: bytearray | None = bytearray()
        self.size = 0
        self.held = False

    @property
    def name(self) -> str:
        """The body's name once it is stored."""
        return self._name if self.small is None else _IN_DATABASE + self._name

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (Piece(self.name, 0, self.size),) if self.size else ()

    def write(self, data: bytes) -> None:
        """:raises OSError: if there is no room."""
        self.size += len(data)
        for digest in self._digests.values():
            digest.update(data)
        if self.small is not None:
            self.small += data
            if self.size <= SMALL:
                return
            data, self.small = bytes(self.small), None
            self._stream = self._path.open("xb")
        assert self._stream is not None
        self._stream.write(data)

    def digest(self, name: str) -> bytes:
        return self._digests[name].digest()

    def digests(self) -> dict[str, bytes]:
        return {name: checksum.digest() for name, checksum in self._digests.items()}

    def finish(self) -> None:
        """Say that no more bytes are to come. A file is synced here, outside every lock."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None
            sync_folder(self._path.parent)

    def discard(self) -> None:
        if self._stream is not None:
            # Closing flushes what is buffered, which fails on a full disk; the bytes are unwanted anyway.
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None
        self._path.unlink(missing_ok=True)


class Bodies:
    """All stored bodies, and who names them. Safe to use from several threads."""

    def __init__(self, folder: Path, read_small: Callable[[str], bytes]) -> None:
        self.folder = folder
        self._read_small = read_small
        self._names: Counter[str] = Counter()
        # A view may be closed by the garbage collector in the middle of anything, so the lock is one for re-entry.
        self._lock = threading.RLock()
        self._arriving: dict[str, Spool] = {}
        self._dead: list[str] = []
        self._unnamed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def spool(self, digests: Iterable[str] = ("md5",)) -> Spool:
        return Spool(self.folder, digests)

    def hold(self, pieces: Iterable[Piece]) -> None:
        """Count one more that names these pieces."""
        with self._lock:
            names = {piece.body for piece in pieces}
            self._names.update(names)
            for name in names & self._arriving.keys():
                self._arriving[name].held = True

    def release(self, pieces: Iterable[Piece]) -> None:
        """Count one less; a body that nothing names is to be removed."""
        with self._lock:
            for name in {piece.body for piece in pieces}:
                self._names[name] -= 1
                if self._names[name] <= 0:
                    del self._names[name]
                    (self._dead if name.startswith(_IN_DATABASE) else self._unnamed).append(name)

    def take_unnamed(self) -> list[str]:
        """Names of files that may go once it is synced that nothing names them."""
        with self._lock:
            unnamed, self._unnamed = self._unnamed, []
        return unnamed

    def remove(self, names: list[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def add(self, spool: Spool) -> None:
        """Let a body be read before it is stored."""
        with self._lock:
            self._arriving[spool.name] = spool

    def settle(self, spool: Spool) -> None:
        """End a request's use of its spool: what nothing ever named is thrown away."""
        with self._lock:
            self._arriving.pop(spool.name, None)
            if not spool.held:
                spool.discard()

    def take_dead(self) -> list[str]:
        """Names of small bodies to delete from the database."""
        with self._lock:
            dead, self._dead = self._dead, []
        return dead

    def put_back_dead(self, names: list[str]) -> None:
        """Take back names that could not be deleted."""
        with self._lock:
            self._dead += names

    def small(self, name: str) -> bytes | None:
        """The bytes of a body that came with the request of now; None if they lie somewhere already."""
        with self._lock:
            spool = self._arriving.get(name)
            return bytes(spool.small) if spool is not None and spool.small is not None else None

    def forget_orphans(self) -> None:
        """Remove the files that nothing names: they were never acknowledged."""
        for path in self.folder.iterdir():
            if path.name not in self._names and _NAME.fullmatch(path.name):
                path.unlink()

    def read(self, pieces: tuple[Piece, ...]) -> bytes | Content:
        """The bytes: themselves if they are few, else a view of them."""
        view = Content(self, pieces)
        return view if len(view) > WHOLE else bytes(view)

    def digest(self, name: str, pieces: Iterable[Piece]) -> bytes:
        """The checksum of the bytes, which are read for it."""
        checksum = Checksum(name)
        for piece in pieces:
            for block in self.blocks(piece):
                checksum.update(block)
        return checksum.digest()

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        if piece.body.startswith(_IN_DATABASE):
            arriving = self.small(piece.body)
            data = self._read_small(piece.body) if arriving is None else arriving
            yield data[piece.start : piece.start + piece.size]
            return
        with (self.folder / piece.body).open("rb", buffering=0) as stream:
            position, stop = piece.start, piece.start + piece.size
            while position < stop:
                block = os.pread(stream.fileno(), min(_BLOCK, stop - position), position)
                if not block:
                    raise OSError(errno.EIO, f"the stored body {piece.body} is shorter than it was")
                position += len(block)
                yield block


class Content:
    """A view of pieces that moto takes for the bytes themselves: it has a length, can be cut and is read in blocks."""

    def __init__(self, bodies: Bodies, pieces: tuple[Piece, ...]) -> None:
        self._bodies, self.pieces = bodies, pieces
        self._open = True
        bodies.hold(pieces)

    def __len__(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def __getitem__(self, part: slice) -> Content:
        start, stop, _ = part.indices(len(self))
        return Content(self._bodies, cut(self.pieces, start, stop))

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            yield from self._bodies.blocks(piece)

    def __bytes__(self) -> bytes:
        return b"".join(self)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._bodies.release(self.pieces)

    __del__ = close


def cut(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of bytes `start` to `stop` of a row of pieces."""
    found = []
    for piece in pieces:
        first, last = max(start, 0), min(stop, piece.size)
        if first < last:
            found.append(Piece(piece.body, piece.start + first, last - first))
        start, stop = start - piece.size, stop - piece.size
    return tuple(found)
