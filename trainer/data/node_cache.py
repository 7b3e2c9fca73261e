"""Files by their SHA-256 on a node's own disk, for the next pod and the next run there that needs the same ones.

::

    FOLDER/ab/abcd...             a file's bytes, under their SHA-256; its time is that of its last use
    FOLDER/ab/abcd....json        a note, under the SHA-256 of what it is about (`trainer.data.model_cache`)
    FOLDER/ab/abcd....part/       what a pod fetches now: `lock` is held by it, `room` says how many bytes are to come
    FOLDER/ab/dropforge-....part  one that is being copied
    FOLDER/.lock                  held by who removes the files that were not used for the longest time

It is a cache: what it gives is held to its name each time, and a folder that cannot be used ends nothing. Whatever else
lies in the folder is neither counted nor removed. A lock ends with its process, so one that was killed leaves none.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

_PIECE: Final = 1 << 20
_ABANDONED_SECONDS: Final = 24 * 3600.0
_LOCK_SECONDS: Final = 30.0  # that making room may take somebody else
_LOOK: Final = 0.1  # seconds between two looks for a lock
_OURS: Final = "dropforge-"
_PART: Final = ".part"
_NOTE: Final = ".json"
_ROOM: Final = "room"
_DIGITS: Final = 20  # of a number of bytes
_NAME: Final = re.compile(r"[0-9a-f]{64}(\.json)?")
_FETCHED: Final = re.compile(r"[0-9a-f]{64}\.part")


class NoRoomError(OSError):
    """What is asked for does not fit beside what is in use."""


class _Held(NamedTuple):
    used: float
    size: int
    path: Path


@dataclass(frozen=True)
class NodeCache:
    """:param most_bytes: what its files may take together. :param say: told why it was not used."""

    folder: Path
    most_bytes: int
    say: Callable[[str], None]
    _leases: dict[str, int] = field(default_factory=dict)  # open files by their SHA-256

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, sha256: str, target: Path) -> bool:
        """Copy a file to `target`; False if it is not there. One that is not what its name says is removed."""
        entry = self.entry(sha256)
        try:
            number = _open(entry)
            if number is None:
                return False
            with os.fdopen(number, "rb") as source, target.open("wb") as copy:
                right = _copy(source, copy) == sha256
            if not right:
                self._wrong(entry)
                return False
            _touch(entry)
        except OSError as error:
            self.unused(error)
            return False
        return True

    def has(self, sha256: str, size: int) -> bool:
        """Whether a file of this size is there, without a look into it. :raises OSError: if nobody can say."""
        try:
            facts = self.entry(sha256).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size == size

    def hold(self, sha256: str, *, checked: bool = False) -> Path | None:
        """A file to be read where it lies, which nobody removes until `release`; None if it is not there.

        One that is not what its name says is removed; one that is held already is not looked through again.

        :param checked: whether we have just put it there, and need not look through it.
        :raises OSError: if it cannot be read, or its disk knows no locks.
        """
        entry = self.entry(sha256)
        held = self._leases.get(sha256)
        if held is not None and _is(entry, held):
            return entry
        number = _open(entry)
        if number is None:
            return None
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None  # it is being removed
            if not _is(entry, number):
                return None
            if checked or _digest(number) == sha256:
                _touch(entry)
                self._leases[sha256], number = number, held  # what was held is no longer what lies there
                return entry
        finally:
            if number is not None:
                os.close(number)
        self._wrong(entry)
        return None

    def adopt(self, path: Path, sha256: str) -> Path:
        """Hold a file of ours where its SHA-256 lies, or the one that is there: other pods may hold that one.

        :param path: on the cache's disk; it is gone then. :param sha256: what it is known to have.
        :raises OSError: if it cannot be put there, or its disk knows no locks.
        """
        entry = self.entry(sha256)
        if self.hold(sha256) is None:
            path.chmod(0o644)  # for pods that run as somebody else
            entry.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, entry)
            except FileExistsError:  # put there meanwhile, or wrong and held by who reads it
                if self.hold(sha256) is None:
                    path.replace(entry)
            if self.hold(sha256, checked=True) is None:
                raise OSError(f"{entry} is gone as soon as it was written")
        path.unlink(missing_ok=True)
        return entry

    def release(self) -> None:
        """Let go of what is held."""
        while self._leases:
            os.close(self._leases.popitem()[1])

    def give(self, sha256: str, source: Path) -> None:
        """Keep a copy of a file whose SHA-256 is known, and first remove what leaves no room for it."""
        entry = self.entry(sha256)
        try:
            size = source.stat().st_size
            if entry.exists() or size > self.most_bytes:
                return
            entry.parent.mkdir(parents=True, exist_ok=True)
            self.make_room(size)
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
            self.unused(error)

    def entry(self, sha256: str) -> Path:
        """Where a file of this SHA-256 lies, or would."""
        return self.folder / sha256[:2] / sha256

    def note(self, sha256: str) -> Path:
        """Where the note about what has this SHA-256 lies, or would."""
        return self.folder / sha256[:2] / f"{sha256}{_NOTE}"

    @contextmanager
    def turn(self, sha256: str, seconds: float, check: Callable[[], None], wait: Callable[[], None]) -> Iterator[Path]:
        """An empty folder on the cache's disk, for one process at a time; it goes in the end, or with the next one's.

        :param sha256: of what it is for. :param seconds: how long to wait for it.
        :param check: called meanwhile; it may raise to stop. :param wait: called once if another process has it.
        :raises OSError: if it cannot be made, or another process has it for too long.
        """
        staging = self.folder / sha256[:2] / f"{sha256}{_PART}"
        end, told = time.monotonic() + seconds, False
        while True:
            lock = _lock_in(staging)
            if lock is not None:
                break
            if not told:
                told = True
                wait()
            if time.monotonic() > end:
                raise TimeoutError(f"another process fetched the same for {seconds:.0f} seconds")
            check()
            time.sleep(_LOOK)
        try:
            work = Path(tempfile.mkdtemp(dir=staging))
            _clear(staging, work.name)
            yield work
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)

    def make_room(self, size: int, work: Path | None = None) -> None:
        """Remove what was not used for the longest time until so many bytes fit, on the disk too.

        :param work: the folder of a `turn` that they are for; they count from now on.
        :raises NoRoomError: if they do not. :raises OSError: if somebody else is at it for too long, or locks fail.
        """
        if size > self.most_bytes:
            raise NoRoomError(f"{size:,} bytes are more than the {self.most_bytes:,} of `compute.data_cache_gb`")
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            _await_lock(lock)
            own = work.parent if work is not None else None
            promised, held = 0, []
            for found in self._held():
                if found.path.suffix != _PART:
                    held.append(found)
                elif found.path != own:
                    promised += found.size
            over = sum(found.size for found in held) + promised + size - self.most_bytes
            over = max(over, promised + size - shutil.disk_usage(self.folder).free)
            for found in sorted(held):
                if over <= 0:
                    break
                if _remove(found.path):
                    over -= found.size
            if over > 0:
                raise NoRoomError(f"{size:,} bytes do not fit: {over:,} too many beside what is in use")
            if own is not None:
                self.promise(size, own)
        finally:
            os.close(lock)

    def promise(self, size: int, staging: Path) -> None:
        """Say how many bytes are still to come into a turn's folder."""
        with tempfile.NamedTemporaryFile("w", dir=staging, prefix=f".{_ROOM}-", delete=False) as temporary:
            temporary.write(str(size))
        made = Path(temporary.name)
        made.chmod(0o644)  # for pods that run as somebody else
        made.replace(staging / _ROOM)

    def unused(self, error: OSError) -> None:
        """Tell that the cache was of no use."""
        self.say(f"the node's cache {self.folder} is not used: {error}")

    def _wrong(self, entry: Path) -> None:
        self.say(f"{entry} is not what was written: it is fetched again")
        with suppress(OSError):  # as where it can only be read
            _remove(entry)

    def _held(self) -> Iterator[_Held]:
        """Our files, and what others fetch now; what a killed pod left goes."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            if folder.is_symlink() or not folder.is_dir():
                continue
            for path in folder.iterdir():
                with suppress(OSError):
                    facts = path.lstat()
                    right = path.name[:2] == folder.name
                    if stat.S_ISDIR(facts.st_mode):
                        if right and _FETCHED.fullmatch(path.name) and not _sweep(path, facts.st_mtime):
                            yield _Held(0.0, _promised(path), path)
                        continue
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if right and _NAME.fullmatch(path.name):
                        yield _Held(facts.st_mtime, facts.st_size, path)
                        continue
                    half = path.name.startswith(_OURS) and path.suffix == _PART
                    if half and facts.st_mtime < time.time() - _ABANDONED_SECONDS:
                        path.unlink()


def _open(path: Path) -> int | None:
    """A plain file, and nothing that somebody else put there to be followed or waited for."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    return number


def _is(path: Path, number: int) -> bool:
    """Whether an open file is the one at a path now."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(number))


def _folder(path: Path) -> int:
    """An open folder, and none that a link leads to. :raises OSError: if it is none."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _clear(staging: Path, work: str) -> None:
    """Remove what a process that was killed left in the folder of its turn. :param work: the one that stays."""
    folder = _folder(staging)
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False) and one.name != work]
        for name in names:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    finally:
        os.close(folder)


def _lock_in(staging: Path) -> int | None:
    """The lock of a folder, which is made; None if another process has it. :raises OSError: if it is no folder."""
    with suppress(FileNotFoundError):  # its owner was done with it between two of our steps
        staging.mkdir(parents=True, exist_ok=True)
        folder = _folder(staging)
        try:
            lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError:
            os.close(lock)
            raise
        if _is(staging / "lock", lock):
            return lock
        os.close(lock)
    return None


def _await_lock(lock: int) -> None:
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK)


def _remove(path: Path) -> bool:
    """Remove a file that no process holds; whether it is gone."""
    try:
        # NFS gives the lock of a writer to nobody who only reads.
        number = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(path, number):
            path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(number)


def _sweep(staging: Path, made: float) -> bool:
    """Remove the folder of a turn whose process is gone; whether it was."""
    try:
        lock = os.open(staging / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        if made < time.time() - _ABANDONED_SECONDS:  # or is being made now
            shutil.rmtree(staging, ignore_errors=True)
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(staging / "lock", lock):
            shutil.rmtree(staging, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _promised(staging: Path) -> int:
    with suppress(OSError, ValueError):
        if (number := _open(staging / _ROOM)) is not None:
            with os.fdopen(number, "rb") as room:
                return max(0, int(room.read(_DIGITS)))
    return 0


def _touch(path: Path) -> None:
    with suppress(OSError):  # a folder that can only be read serves all the same
        os.utime(path)


def _digest(number: int) -> str:
    with os.fdopen(os.dup(number), "rb") as source:
        return _copy(source)


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> str:
    """:returns: SHA-256 of what was copied, or read."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        if target is not None:
            target.write(piece)
    if target is not None:
        target.flush()
    return digest.hexdigest()
