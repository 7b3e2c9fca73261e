"""A sealed checkpoint for `torch.distributed.checkpoint`: any mesh and any number of ranks can read it.

torch's planner finds the blocks that a rank's shards overlap; only the files that hold them are fetched, and each is
used only if its bytes are those that were sealed.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer.state.blocks import DTYPES, read_blocks
from trainer.state.checkpoint import PROGRESS, Checkpoints, Seal


def fill(checkpoints: Checkpoints, seal: Seal, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint into tensors, in place; of a DTensor into the shard of this rank. No rank waits for another.

    :param state: tensors by their names in the files (`weights/NAME`, `moments/NAME:exp_avg`).
    :raises DropforgeError, ValueError, KeyError: if it is broken. :raises StorageError: if it cannot be read now.
    :raises RuntimeError: if it lacks a tensor or has it in another shape.
    """
    reader = BlockReader(checkpoints, seal)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no process group takes part, as is meant here
            load(dict(state), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class BlockReader(StorageReader):
    """The files of one checkpoint, as torch's loader wants them."""

    def __init__(self, checkpoints: Checkpoints, seal: Seal) -> None:
        self._checkpoints = checkpoints
        self._seal = seal
        self._files: dict[MetadataIndex, str] = {}
        try:
            self._metadata = self._read_headers()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a file's header contradicts itself ({error!r})") from error

    def _read_headers(self) -> Metadata:
        """Which blocks there are; the bytes behind the headers are looked at only if a rank needs them."""
        found: dict[str, Any] = {}
        for file in self._seal.files:
            if file == PROGRESS:
                continue
            header = self._checkpoints.header(self._seal, file)
            places = json.loads(header.pop("__metadata__")["blocks"])
            for name, entry in header.items():
                shape, offsets = entry["shape"], [0] * len(entry["shape"])
                if name in places:
                    shape, offsets = places[name]["shape"], places[name]["offsets"]
                if name not in found:
                    kind = TensorProperties(dtype=DTYPES[entry["dtype"]])
                    found[name] = TensorStorageMetadata(kind, torch.Size(shape), [])
                found[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(entry["shape"])))
                self._files[MetadataIndex(name, torch.Size(offsets))] = file
        return Metadata(found, storage_data=self._files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return False  # it is made for one checkpoint, and finds none by itself

    def reset(self, checkpoint_id: Any = None) -> None:
        del checkpoint_id

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        del metadata, is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[self._files[item.storage_index]].append(item)
        for file, items in wanted.items():
            blocks = read_blocks(self._checkpoints.file(self._seal, file))
            for item in items:
                part = blocks[item.storage_index.fqn].values
                for dimension, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, offset, size)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
