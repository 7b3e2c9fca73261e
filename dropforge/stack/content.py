"""One object, one file: how the embedded store keeps objects on the disk.

A file is the object's bytes, then a trailer: JSON (key, size, entity tag, metadata, ...), its length and CRC-32,
a mark.
It is written under `tmp/`, synced, and only then renamed to `buckets/BUCKET/HH/SHA256-OF-KEY.GENERATION`, so a name in
a bucket is always a whole object, whatever was killed when. The newest generation of a key counts; files never change.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

_TAIL = struct.Struct("<II8s")  # length of the JSON, its CRC-32, the mark
_MARK = b"DFOBJ\x00\x00\x01"
_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_full(error: BaseException) -> bool:
    """Whether a write failed because there is no room: disk, quota or file size limit."""
    return isinstance(error, OSError) and error.errno in _FULL


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Record:
    """What is known of an object beside its bytes. `etag` has no quotes; `modified` is seconds since 1970."""

    key: str
    size: int
    etag: str
    modified: float
    metadata: dict[str, str] = field(default_factory=dict)
    storage: str = "STANDARD"
    checksum_algorithm: str | None = None
    checksum_value: str | None = None
    upload: str | None = None


@dataclass(frozen=True)
class Stored:
    """An object that is on the disk."""

    path: Path
    generation: int
    record: Record


class Content:
    """A range of a stored file that is read only when it is sent: what moto takes for the object's bytes."""

    def __init__(self, stream: IO[bytes], start: int, stop: int) -> None:
        self._stream, self._start, self._stop = stream, start, stop

    @classmethod
    def open(cls, path: Path, size: int) -> Content:
        """:raises FileNotFoundError: if the object was replaced or deleted meanwhile."""
        return cls(path.open("rb", buffering=0), 0, size)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> Content:
        start, stop, _ = part.indices(len(self))
        return Content(self._stream, self._start + start, self._start + max(start, stop))

    def __iter__(self) -> Iterator[bytes]:
        handle, position = self._stream.fileno(), self._start
        while position < self._stop:
            block = os.pread(handle, min(_CHUNK, self._stop - position), position)
            if not block:
                raise OSError(errno.EIO, "the object's file is shorter than its record says")
            position += len(block)
            yield block

    def __bytes__(self) -> bytes:
        return b"".join(self)

    def close(self) -> None:
        self._stream.close()


class Spool:
    """Bytes on their way in: a file under `tmp/` that becomes an object, or is thrown away."""

    _numbers = itertools.count()

    def __init__(self, tmp: Path, *, digests: tuple[str, ...] = ("md5",)) -> None:
        self.path = tmp / f"{os.getpid()}-{next(self._numbers)}"
        self.size = 0
        self._stream: IO[bytes] | None = self.path.open("xb")
        self._digests = {name: Checksum(name) for name in digests}

    def write(self, data: bytes) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self.size += len(data)
        for digest in self._digests.values():
            digest.update(data)

    def digest(self, name: str) -> bytes:
        return self._digests[name].digest()

    def append_file(self, path: Path, size: int) -> None:
        """Append the first `size` bytes of another file without reading them into this process."""
        assert self._stream is not None
        self._stream.flush()
        with path.open("rb", buffering=0) as source:
            left = size
            while left:
                moved = _copy_some(source.fileno(), self._stream.fileno(), left)
                if not moved:
                    raise OSError(errno.EIO, "a part's file is shorter than it was")
                left -= moved
        self._stream.seek(0, os.SEEK_END)
        self.size += size

    def finish(self) -> None:
        """No more bytes are to come. What is large is synced here, outside every lock."""
        if self._stream is not None:
            self._stream.flush()
            if self.size >= _CHUNK:
                os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def seal(self, record: Record) -> None:
        """Write the trailer and sync: from here on a rename makes the object."""
        self.finish()
        text = json.dumps(asdict(record), separators=(",", ":")).encode()
        with self.path.open("ab") as stream:
            stream.write(text + _TAIL.pack(len(text), zlib.crc32(text), _MARK))
            stream.flush()
            os.fsync(stream.fileno())

    def discard(self) -> None:
        if self._stream is not None:
            # Closing flushes what is buffered, which fails on a full disk; the bytes are unwanted anyway.
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None
        self.path.unlink(missing_ok=True)


def _copy_some(source: int, target: int, count: int) -> int:
    """Copy up to `count` bytes between two files at their positions, inside the kernel where it can."""
    try:
        return os.copy_file_range(source, target, count)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
        return os.write(target, os.read(source, min(_CHUNK, count)))


class Checksum:
    """A running checksum by S3's name; only those that the standard library can compute."""

    names = ("md5", "sha1", "sha256", "crc32")

    def __init__(self, name: str) -> None:
        self._crc = 0
        self._hash = None if name == "crc32" else hashlib.new(name, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        if self._hash is None:
            self._crc = zlib.crc32(data, self._crc)
        else:
            self._hash.update(data)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big") if self._hash is None else self._hash.digest()


def decode_checksum(value: str) -> bytes | None:
    """The bytes of a base64 checksum header; None if it is none."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None


class ObjectFolder:
    """The folder of all buckets. Every method is safe to call from several threads for different keys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp = root / "tmp"
        self._buckets = root / "buckets"
        self._generations = itertools.count(1)
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        # What lies in tmp/ was never acknowledged.
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(parents=True)
        self._buckets.mkdir(exist_ok=True)

    def spool(self, digests: tuple[str, ...] = ("md5",)) -> Spool:
        return Spool(self.tmp, digests=digests)

    def buckets(self) -> list[str]:
        return sorted(path.name for path in self._buckets.iterdir() if path.is_dir())

    def create_bucket(self, name: str) -> None:
        (self._buckets / name).mkdir(exist_ok=True)
        sync_folder(self._buckets)

    def delete_bucket(self, name: str) -> None:
        """Remove an empty bucket's folder."""
        shutil.rmtree(self._buckets / name)
        sync_folder(self._buckets)
        with self._lock:
            self._known = {path for path in self._known if path.parent.name != name}

    def load(self, bucket: str, report: Callable[[str], None]) -> Iterator[Stored]:
        """The newest whole object of every key, one at a time; older generations are removed, broken files reported."""
        newest = 0
        for shard in sorted((self._buckets / bucket).iterdir()):
            found: dict[str, list[tuple[int, Path]]] = {}
            for path in shard.iterdir():
                digest, _, number = path.name.partition(".")
                if number.isdigit():
                    found.setdefault(digest, []).append((int(number), path))
            for generations in found.values():
                kept = False
                for generation, path in sorted(generations, reverse=True):
                    newest = max(newest, generation)
                    if kept:
                        path.unlink()
                        continue
                    record = read_record(path)
                    if record is None:
                        report(f"{path} is not a whole object and is left where it is")
                        continue
                    kept = True
                    yield Stored(path, generation, record)
        with self._lock:
            self._generations = itertools.count(max(newest + 1, next(self._generations)))

    def commit(self, bucket: str, spool: Spool, record: Record) -> Stored:
        """Give a sealed file its name; on return the object outlives any kill."""
        shard, name = self._place(bucket, record.key)
        with self._lock:
            generation = next(self._generations)
        path = shard / f"{name}.{generation}"
        spool.path.rename(path)
        try:
            sync_folder(shard)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Stored(path, generation, record)

    def remove(self, stored: Stored, *, durable: bool) -> None:
        """Remove an object's file; with `durable`, and any older generation, before this returns."""
        if durable:
            name = stored.path.name.partition(".")[0]
            # Oldest first: a crash in between must not bring an older generation back.
            older = [path for path in stored.path.parent.glob(f"{name}.*") if path != stored.path]
            for path in sorted(older, key=lambda path: int(path.suffix[1:])):
                path.unlink(missing_ok=True)
        stored.path.unlink(missing_ok=True)
        if durable:
            sync_folder(stored.path.parent)

    def _place(self, bucket: str, key: str) -> tuple[Path, str]:
        # The name is a digest: no key, however hostile, can leave the folder or be too long for it.
        name = hashlib.sha256(key.encode()).hexdigest()
        shard = self._buckets / bucket / name[:2]
        if shard not in self._known:
            shard.mkdir(exist_ok=True)
            sync_folder(shard.parent)
            with self._lock:
                self._known.add(shard)
        return shard, name


def read_record(path: Path) -> Record | None:
    """Read a file's trailer; None if the file is not whole."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < _TAIL.size:
            return None
        length, checksum, mark = _TAIL.unpack(os.pread(stream.fileno(), _TAIL.size, size - _TAIL.size))
        start = size - _TAIL.size - length
        if mark != _MARK or start < 0:
            return None
        text = os.pread(stream.fileno(), length, start)
    if zlib.crc32(text) != checksum:
        return None
    values: dict[str, Any] = json.loads(text)
    record = Record(**values)
    return record if record.size == start else None
