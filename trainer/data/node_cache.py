"""Files by their SHA-256 on a node's own disk, for the next pod and the next run there that needs the same ones.

::

    FOLDER/ab/abcd...             a file's bytes, under their SHA-256; its time is that of its last use
    FOLDER/ab/dropforge-....part  one that is being copied
    FOLDER/.lock                  held by who removes the files that were not used for the longest time

It is a cache: what it gives is held to its name each time, and a folder that cannot be used ends nothing. Whatever else
lies in the folder is neither counted nor removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_PIECE: Final = 1 << 20
_ABANDONED_SECONDS: Final = 24 * 3600.0
_OURS: Final = "dropforge-"
_PART: Final = ".part"
_NAME: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class NodeCache:
    """:param most_bytes: what its files may take together. :param say: told why it was not used."""

    folder: Path
    most_bytes: int
    say: Callable[[str], None]

    def take(self, sha256: str, target: Path) -> bool:
        """Copy a file to `target`; False if it is not there. One that is not what its name says is removed."""
        entry = self._entry(sha256)
        try:
            found = _open(entry)
            if found is None:
                return False
            with found as source, target.open("wb") as copy:
                right = _copy(source, copy) == sha256
            if not right:
                self.say(f"{entry} is not what was written: it is fetched anew")
                entry.unlink(missing_ok=True)
                return False
            with suppress(OSError):  # a folder that can only be read serves all the same
                os.utime(entry)
        except OSError as error:
            self._unused(error)
            return False
        return True

    def give(self, sha256: str, source: Path) -> None:
        """Keep a copy of a file whose SHA-256 is known, and first remove what leaves no room for it."""
        entry = self._entry(sha256)
        try:
            size = source.stat().st_size
            if entry.exists() or size > self.most_bytes:
                return
            entry.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=_OURS, suffix=_PART, delete=False) as copy:
                try:
                    os.fchmod(copy.fileno(), 0o644)  # for pods that run as somebody else
                    with source.open("rb") as stream:
                        _copy(stream, copy)
                    Path(copy.name).replace(entry)
                except BaseException:
                    Path(copy.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            self._unused(error)

    def _entry(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def _unused(self, error: OSError) -> None:
        self.say(f"the node's cache {self.folder} is not used: {error}")

    def _make_room(self, size: int) -> None:
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            with suppress(OSError):  # somebody is at it, or the file system knows no locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = sorted(self._held())
                over = sum(size for _, size, _ in held) + size - self.most_bytes
                for _, freed, path in held:
                    if over <= 0:
                        return
                    with suppress(OSError):
                        path.unlink()
                        over -= freed
        finally:
            os.close(lock)

    def _held(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and place of each of our files; what a killed pod left half copied goes."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            if folder.is_symlink() or not folder.is_dir():
                continue
            for path in folder.iterdir():
                with suppress(OSError):
                    facts = path.lstat()
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if _NAME.fullmatch(path.name) and path.name[:2] == folder.name:
                        yield facts.st_mtime, facts.st_size, path
                        continue
                    half = path.name.startswith(_OURS) and path.suffix == _PART
                    if half and facts.st_mtime < time.time() - _ABANDONED_SECONDS:
                        path.unlink()


def _open(path: Path) -> IO[bytes] | None:
    """A plain file, and nothing that somebody else put there to be followed or waited for."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    return os.fdopen(number, "rb")


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """:returns: SHA-256 of what was copied."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        target.write(piece)
    target.flush()
    return digest.hexdigest()
