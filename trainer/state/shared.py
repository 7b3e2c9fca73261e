"""Whether a place takes checkpoints, and all nodes write to the same one: else what was written at hour 10 is lost."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import Final

from dropforge.errors import FULL, DropforgeError, RecipeError
from dropforge.store import LASTING, Store
from trainer.gang import Gang
from trainer.state.checkpoint import StorageError

_PATIENCE: Final = 10.0  # seconds; a network file system may show a new file late
# What another try would meet again: no rights, no such place, or a file system that lacks what is asked of it.
_LASTING: Final = (
    errno.EACCES,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
)
_LASTING_S3: Final = LASTING | {"InvalidAccessKeyId", "NotImplemented", "SignatureDoesNotMatch"}


def check_shared(store: Store, gang: Gang, patience: float = _PATIENCE) -> None:
    """Rank 0 tries what a checkpoint needs; then one rank of each node writes a token, and rank 0 must see them all.

    :raises RecipeError: on every rank, if the place takes no checkpoints, or naming the nodes that write elsewhere or
        cannot write at all.
    :raises StorageError: on every rank, if the place cannot be written to now.
    """
    failure = gang.gather(_trial(store) if gang.leader else None)[0]
    if failure is not None:
        raise failure
    _check_nodes(store, gang, patience)


def _trial(store: Store) -> RecipeError | StorageError | None:
    """Why no checkpoint can be written; None if one can, or could if there were room.

    A full disk may have room by the time of the first checkpoint, and otherwise that one tells of it.
    """
    key = f"checkpoints/.trial-{os.urandom(6).hex()}"
    try:
        try:
            store.put(key, b"")
            store.delete(key)
            # A manifest is written like this: of two jobs that train one run, the second must hear of the first.
            conditional = store.put_if_absent(key, b"1") and not store.put_if_absent(key, b"2")
        finally:
            store.delete(key)
    except Exception as error:  # stores raise many kinds
        if isinstance(error, OSError) and error.errno in FULL:
            return None
        if _lasts(error):
            return RecipeError(
                f"run folder {store.uri}",
                f"no checkpoint can be written there ({error})",
                "Give the trainer the rights to write and delete there, on a file system with hard links, or name "
                "another place",
            )
        return StorageError(f"{store.uri} cannot be written to now ({error}). Fix the storage and try again")
    if not conditional:
        return RecipeError(
            f"run folder {store.uri}",
            "it does not keep to conditional writes, so two jobs could overwrite each other's checkpoints",
            "Name a place that does",
        )
    return None


def _lasts(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _LASTING
    answer = getattr(error, "response", None)  # of S3
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return code in _LASTING_S3 or isinstance(error, DropforgeError)


def _check_nodes(store: Store, gang: Gang, patience: float) -> None:
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
