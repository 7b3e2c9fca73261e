"""Rank 0 chooses and reads the checkpoint; the others get it from rank 0, so that all resume from the same one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dropforge.errors import DropforgeError
from trainer.gang import Gang, collective
from trainer.state.checkpoint import Checkpoints, Snapshot, StorageError

T = TypeVar("T")


def choose_checkpoint(checkpoints: Checkpoints, gang: Gang) -> Snapshot | None:
    """The newest whole checkpoint, on every rank; None for a fresh start.

    :raises DropforgeError: on every rank, if it belongs to another plan, recipe or layout.
    :raises StorageError: on every rank, if rank 0 cannot read what is there.
    """
    found: Snapshot | None = None
    failure: Exception | None = None
    if gang.leader:
        try:
            newest = checkpoints.newest()
            found = newest[1] if newest else None
            checkpoints.sweep()
        except (DropforgeError, StorageError) as error:
            failure = error
        except Exception as error:  # the others wait for an answer, and not every error can be sent
            failure = StorageError(f"the checkpoints in {checkpoints.store.uri} cannot be looked at ({error})")
    message: tuple[Exception | None, Any] = (failure, None if found is None else _head(found))
    failure, outline = _broadcast(gang, message)
    if failure is not None:
        raise failure
    if outline is None or gang.world == 1:
        return found
    snapshot, shapes = outline
    weights, moments = (
        _share(gang, part, own)
        for part, own in zip(shapes, (found.weights, found.moments) if found else ({}, {}), strict=True)
    )
    restored: Snapshot = replace(snapshot, weights=weights, moments=moments)
    return restored


def _head(snapshot: Snapshot) -> tuple[Snapshot, list[dict[str, Any]]]:
    shapes = [
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()}
        for part in (snapshot.weights, snapshot.moments)
    ]
    return replace(snapshot, weights={}, moments={}), shapes


def _broadcast(gang: Gang, value: T) -> T:
    if gang.world == 1:
        return value
    box: list[T] = [value]
    with collective():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _share(gang: Gang, shapes: dict[str, Any], own: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        tensor = own[name] if gang.leader else torch.empty(shape, dtype=dtype)
        with collective():
            dist.broadcast(tensor, src=0)
        found[name] = tensor
    return found
