"""One hand at a family's alias: who reads which version holds it and then moves it is not overtaken in between.

MLflow has no conditional move, so whoever moves an alias holds a lock of the ledger for that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from dropforge import layout
from dropforge.lock import locked
from dropforge.store import Store


def moving(
    store: Store,
    family: str,
    owner: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AbstractContextManager[None]:
    """Hold the family's aliases; waits for others. :param owner: who moves; the rest as of `dropforge.lock`."""
    thing, doing = f"the aliases of {family}", "moving them"
    return locked(store, layout.move_key(family), owner, thing, doing, clock=clock, sleep=sleep)
