"""The folder of a node for prepared data: it goes with its launcher, or with the next one if that was killed."""

from __future__ import annotations

import fcntl
import shutil
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
    """Remove the folders whose locks nobody holds; what belongs to others stays."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
