"""The three streams that every program has: open, where whoever started it gave it fewer, as some daemons do, and fit
for any text, whatever the locale."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def hold_standard_streams() -> None:
    """Open `/dev/null` in place of each that is closed: else the next file takes its number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # as Python has it then
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def escape_unencodable() -> None:
    """Have what the locale's encoding lacks written as `\\u9879`: names from outside end no command in the telling."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # None, if it is closed, or what somebody put in its place
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
