"""A bound on the memory that one file may take while a library reads it.

A table of a few hundred bytes may stand for gigabytes: a dictionary's one value in every row, pages and buffers that
expand, lengths that lie. Arrow cannot be told how much to take, and nothing in such a file can be believed beforehand.
So the calls that read it run with a limit on the process's address space, so much above what it has: what would go
beyond fails there with a `MemoryError`, which ends this file alone. On Linux only; elsewhere nothing is bounded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import pyarrow as pa

try:
    import resource
except ImportError:  # pragma: no cover - Windows
    resource = None  # type: ignore[assignment]

#: What reading may add, and for each byte of the longest row that is let pass: a page, its dictionary, its values, and
#: the row as an object.
_FREE: Final = 1 << 30
_ROWS: Final = 8
#: What C++ says of memory that it does not get, where Arrow makes an error of another kind of it.
_REFUSED: Final = "std::bad_alloc"
_STATM: Final = Path("/proc/self/statm")


class _Limit:
    """The process's soft limit, which the first of its threads sets and the last one takes back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before: tuple[int, int] | None = None

    def enter(self, more: int) -> None:
        with self.lock:
            self.users += 1
            if self.users > 1 or resource is None:
                return
            with suppress(OSError, ValueError):
                held = int(_STATM.read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                soft, hard = resource.getrlimit(resource.RLIMIT_AS)
                if soft == resource.RLIM_INFINITY or soft > held + more:
                    resource.setrlimit(resource.RLIMIT_AS, (held + more, hard))
                    self.before = soft, hard

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users and self.before is not None:
                resource.setrlimit(resource.RLIMIT_AS, self.before)
                self.before = None


_LIMIT: Final = _Limit()


def bound_of(max_row_bytes: int) -> int:
    """Bytes that reading a file may add to a process."""
    return _FREE + _ROWS * max_row_bytes


@cache
def _warm() -> None:
    """Have Arrow's allocator reserve its gigabyte of addresses, which it does with its first bytes."""
    pa.allocate_buffer(1)


@contextmanager
def bounded(max_row_bytes: int) -> Iterator[None]:
    """Let what is called add no more than `bound_of` to the process. :raises MemoryError: where it would."""
    _warm()
    _LIMIT.enter(bound_of(max_row_bytes))
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if _REFUSED in str(error):
            raise MemoryError(str(error)) from error
        raise
    finally:
        _LIMIT.leave()


def too_much(what: str, max_row_bytes: int) -> str:
    """The detail of a refusal. :param what: that would take more, as `rows 0 to 9`."""
    return f"{what}: reading takes more than {bound_of(max_row_bytes) >> 20} MiB of memory"
