"""Files of this machine that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file by a new one beside it, which takes its name; nothing is written through a link that lies there.

    :param mode: of the file, without what the umask takes.
    :raises OSError: if it cannot be written; what was there before stays.
    """
    new = path.with_name(f".{secrets.token_hex(8)}.part")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with naming(path):
            _write(handle, data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a file of `most` bytes at most.

    :raises FileNotFoundError: if it is not there. :raises ValueError: if it is larger, or a pipe, device or folder.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def write_new(path: Path, data: bytes) -> None:
    """Write a file where there is none; if that fails nothing of it stays.

    :raises FileExistsError: if there is one. :raises OSError: if it cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with naming(path):
            _write(handle, data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of what is open already, as of a full disk, name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _write(handle: int, data: bytes) -> None:
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
