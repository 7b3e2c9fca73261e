"""Waiting for an event, but not longer than so."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def happens(event: asyncio.Event, within: float | None) -> bool:
    """Whether the event is set within so many seconds; None waits for ever. Clears nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()
            return True
    return False
