"""Logs of running services: bounded, whatever a service writes. The supervisor cuts them; services only append."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def cut_log(path: Path, limit: int) -> bool:
    """Move what a log holds beside it, in the place of what was there before, once it is longer than `limit` bytes.

    The service keeps the file open and goes on at its new end; lines between copy and cut are lost. Return whether the
    log was cut: without room for a copy, the log goes, for it may be what fills the disk.
    """
    try:
        if path.stat().st_size <= limit:
            return False
    except FileNotFoundError:
        return False
    older, copy = path.with_suffix(".log.1"), path.with_suffix(".log.tmp")
    try:
        shutil.copyfile(path, copy)
        copy.replace(older)
    except OSError:
        with contextlib.suppress(OSError):
            copy.unlink()
    os.truncate(path, 0)
    return True
