"""Files of a person that are written whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by a new one beside it, which takes its name; nothing is written through a link that lies there.

    :raises OSError: if it cannot be written; what was there before stays.
    """
    new = path.with_name(f".{secrets.token_hex(8)}.part")
    with new.open("xb") as stream:
        try:
            stream.write(data)
            stream.flush()
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
