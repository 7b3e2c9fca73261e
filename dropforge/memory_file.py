"""Memory as a file, for uploads."""

from __future__ import annotations

import io
from typing import Any


class MemoryFile(io.RawIOBase):
    """Memory as a file, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._data)}[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, target: Any) -> int:
        part = self._data[self._place : self._place + len(target)]
        target[: len(part)] = part
        self._place += len(part)
        return len(part)
