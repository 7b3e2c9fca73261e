"""Whose program listens on a port of this machine: any user may take one that is free, and would be told passwords."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
# Addresses, as the kernel writes them, at which 127.0.0.1 is answered: itself, all of IPv4, and both by IPv6.
_LOCAL: Final = {
    "0100007F",
    "00000000",
    "0" * 32,
    "0000000000000000FFFF00000100007F",
    "0000000000000000FFFF000000000000",
}


def other_user(port: int) -> int | None:
    """The other user (uid) whose program listens on this port of 127.0.0.1; None if none does, as far as is known."""
    return next((uid for uid in _listening(port) if uid != os.geteuid()), None)


def _listening(port: int) -> Iterator[int]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # without IPv6, or where the kernel does not tell
            continue
        for line in lines:
            _, local, _, state, *_, uid = line.split()[:8]
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and address in _LOCAL:
                yield int(uid)
