"""Whether all nodes write to the same place: a folder of each node's own would lose what the others wrote."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from dropforge.errors import DropforgeError, RecipeError
from dropforge.store import Store
from trainer.gang import Gang

_PATIENCE: Final = 10.0  # seconds; a network file system may show a new file late


def check_shared(store: Store, gang: Gang, patience: float = _PATIENCE) -> None:
    """One rank of each node writes a token, and rank 0 must see them all.

    :raises RecipeError: on every rank, naming the nodes that write elsewhere or cannot write at all.
    """
    if gang.world <= gang.local_world:
        return
    own, failure = None, None
    if gang.local_rank == 0:
        own = f"checkpoints/.node-{gang.rank}-{os.urandom(6).hex()}"
        try:
            store.put(own, b"")
        except Exception as error:  # stores raise many kinds
            failure = str(error)
    told = gang.gather((own, os.uname().nodename, failure))
    lacking: list[str] = []
    if gang.leader:
        lacking = [f"{name} ({why})" for _, name, why in told if why]
        waiting = {key: name for key, name, why in told if key and not why}
        until = time.monotonic() + patience
        while waiting:
            waiting = {key: name for key, name in waiting.items() if store.stat(key) is None}
            if time.monotonic() > until:
                break
            if waiting:
                time.sleep(0.1)
        lacking += sorted(waiting.values())
    lacking = gang.gather(lacking)[0]
    if own is not None and failure is None:
        with suppress(OSError, DropforgeError):
            store.delete(own)
    if lacking:
        raise RecipeError(
            f"run folder {store.uri}",
            f"rank 0 does not see there what these nodes write: {', '.join(lacking)}",
            "Give all nodes the same folder, or an `s3://` address: a folder of a node's own loses checkpoints",
        )
