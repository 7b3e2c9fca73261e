"""One hand at a family's alias: who reads which version holds it and then moves it is not overtaken in between.

MLflow has no conditional move. So whoever moves an alias holds an object in the ledger for that moment, taken by
conditional PUT. Who was killed meanwhile takes it up again when tried anew; others take it over after `STALE` seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dropforge import layout
from dropforge.errors import DropforgeError
from dropforge.json_objects import UnreadableError, read_as
from dropforge.store import MissingObjectError, Store

STALE: Final = 600.0  # more than MLflow's client takes to give up
_PAUSE: Final = 0.2
_MEND: Final = "If nobody moves the family's aliases now, delete it"


@contextmanager
def moving(
    store: Store,
    family: str,
    owner: str,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the family's aliases; waits for others.

    :param owner: who moves; the same one again needs not wait for itself.
    :raises DropforgeError: if others hold them for twice as long as anybody should, or it cannot be read who does.
    """
    key, until = layout.move_key(family), clock() + 2 * STALE
    while (holder := _take(store, key, owner, clock())) != owner:
        if clock() > until:
            raise DropforgeError(
                f"the aliases of {family}",
                f"{holder} has been moving them for a long time",
                f"See what became of it; if nobody moves them, delete {store.uri}/{key}",
            )
        sleep(_PAUSE)
    try:
        yield
    finally:
        with suppress(UnreadableError):  # no more ours; whoever comes next is told
            found = _held(store, key)
            if found is not None and found[0] == owner:
                store.delete(key)


def _take(store: Store, key: str, owner: str, now: float) -> str:
    """Take the object if it is free, or was left behind; who holds it then."""
    body = json.dumps({"owner": owner, "at": now}).encode()
    if store.put_if_absent(key, body):
        return owner
    known, found = store.stat(key), _held(store, key)
    if known is None or found is None:
        return "somebody"  # gave it up at this moment
    holder, since = found
    mine = holder == owner or now - since > STALE
    return owner if mine and store.put_if_match(key, body, known.etag) else holder if holder != owner else "somebody"


def _held(store: Store, key: str) -> tuple[str, float] | None:
    try:
        return read_as(store, key, lambda found: (str(found["owner"]), float(found["at"])), _MEND)
    except MissingObjectError:
        return None
