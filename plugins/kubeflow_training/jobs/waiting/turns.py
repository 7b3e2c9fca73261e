"""Turns of work in a shared event loop: a thousand jobs that have news at once must not hold up everything else.

Work is done one piece at a time, and after a hundredth of a second the rest of the loop comes first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakKeyDictionary

SLICE: Final = 0.01  # seconds


class _Turns:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.since = 0.0


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


@asynccontextmanager
async def turn() -> AsyncIterator[float]:
    """Wait for one's turn, and do a piece of work in it that does not wait.

    :returns: when the turn should end (monotonic seconds).
    """
    loop = asyncio.get_running_loop()
    turns = _TURNS.get(loop)
    if turns is None:
        turns = _TURNS[loop] = _Turns()
    async with turns.lock:
        yield time.monotonic() + SLICE
        if time.monotonic() - turns.since > SLICE:
            # With the lock held: nobody else works before the loop has gone round.
            await asyncio.sleep(0)
            turns.since = time.monotonic()
