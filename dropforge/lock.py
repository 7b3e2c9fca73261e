"""A lock in the bucket, held for a moment by one of several processes of several machines.

It is an object that is taken by conditional PUT. Who was killed meanwhile takes it up again when tried anew; others
take it over once they have seen it unchanged for `STALE` seconds of their own, whatever became of the calendar's clock
meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dropforge.errors import DropforgeError
from dropforge.json_objects import UnreadableError, read_as
from dropforge.store import MissingObjectError, Store

STALE: Final = 600.0  # more than MLflow's client takes to give up
_PAUSE: Final = 0.2


@contextmanager
def locked(
    store: Store,
    key: str,
    owner: str,
    thing: str,
    doing: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold a lock; waits for others.

    :param owner: who holds it; the same one again needs not wait for itself. :param thing: what it guards, and
    :param doing: what is done to that, as errors say it. :param clock: one that nobody sets.
    :raises DropforgeError: if others hold it for twice as long as anybody should, or it cannot be read who does.
    """
    began = clock()
    left, since = "", began  # tag of what another holds, and when it was seen first
    while True:
        found = _take(store, key, owner, left if clock() - since > STALE else "", _mend(doing))
        if found is None:
            break
        holder, tag = found
        if clock() - began > 2 * STALE:
            raise DropforgeError(
                thing,
                f"{holder} has been {doing} for a long time",
                f"Check whether it still runs; if nothing is {doing}, delete {store.uri}/{key}",
            )
        if tag != left:
            left, since = tag, clock()
        sleep(_PAUSE)
    try:
        yield
    finally:
        with suppress(UnreadableError):  # no more ours; whoever comes next is told
            if _held(store, key, _mend(doing)) == owner:
                store.delete(key)


def _mend(doing: str) -> str:
    return f"If nothing is {doing} now, delete it"


def _take(store: Store, key: str, owner: str, left: str, mend: str) -> tuple[str, str] | None:
    """Take the object if it is free, or was left behind; else who holds it, and its tag.

    :param left: tag of what was left behind.
    """
    # The time makes each object another one; nobody counts by it.
    body = json.dumps({"owner": owner, "at": time.time()}).encode()
    if store.put_if_absent(key, body):
        return None
    known, holder = store.stat(key), _held(store, key, mend)
    if known is None or holder is None:
        return "somebody", ""  # gave it up at this moment
    if (holder == owner or known.etag == left) and store.put_if_match(key, body, known.etag):
        return None
    return holder, known.etag


def _held(store: Store, key: str, mend: str) -> str | None:
    try:
        return read_as(store, key, lambda found: str(found["owner"]), mend)
    except MissingObjectError:
        return None
