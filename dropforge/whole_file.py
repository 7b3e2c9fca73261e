"""Files of this machine that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file by a new one beside it, which takes its name; nothing is written through a link that lies there.

    :param mode: of the file, without what the umask takes.
    :raises OSError: if it cannot be written; what was there before stays.
    """
    new = path.with_name(f".{secrets.token_hex(8)}.part")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
