"""The three streams that every program has, where whoever started it gave it fewer, as some daemons do."""

from __future__ import annotations

import os


def hold_standard_streams() -> None:
    """Open `/dev/null` in place of each that is closed: else the next file takes its number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(number, True)
