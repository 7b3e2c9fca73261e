"""The folder of a node for prepared data: it goes with its launcher, or with the next one if that was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "dropforge-scratch-"
_LOCK: Final = "lock"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder for as long as this process runs; those of launchers that were killed are removed first."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        with (folder / f".{_LOCK}").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            (folder / f".{_LOCK}").rename(folder / _LOCK)  # nobody sees it before it is held
            yield folder


def sweep(place: Path) -> None:
    """Remove the folders of this user whose locks nobody holds; what belongs to others is not touched."""
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r+") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
