"""The logs of the state folder, opened by who starts a service and read for error messages.

Nothing waits on what lies in a log's place: a pipe would stop who opens it until somebody comes to its other end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_log(path: Path) -> int:
    """Open a log to write at its end, and return the descriptor.

    :raises OSError: if it cannot be opened, or is no file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise _no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle


def read_end(path: Path, most: int) -> str:
    """The last bytes of a log as text, at most so many; nothing if it cannot be read, or is no file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as stream:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                return ""
            stream.seek(max(0, found.st_size - most))
            return stream.read(most).decode(errors="replace")
    except OSError:
        return ""


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file, as a log has to be", str(path))
