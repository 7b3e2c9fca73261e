"""Memory that nothing uses any more."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import pyarrow as pa


def give_back() -> None:
    """Hand what Arrow and the C library keep for later back to the machine: the next step is another kind of work."""
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # only the GNU library can be asked
        ctypes.CDLL(None).malloc_trim(0)
