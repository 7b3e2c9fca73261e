"""A lock that its holder's end releases, and that others can look at without touching it.

Unlike a process id it means the same in every container that shares the folder.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

_WHOLE_FILE: Final = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def take(path: Path) -> int | None:
    """Take the lock until the process ends or closes this file descriptor; None if somebody has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WHOLE_FILE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def held(path: Path) -> bool:
    """Whether somebody has the lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _WHOLE_FILE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(handle)
    kind: int = _WHOLE_FILE.unpack(found)[0]
    return kind != fcntl.F_UNLCK
