"""A sealed checkpoint for `torch.distributed.checkpoint`: any mesh and any number of ranks can read it.

torch's planner finds the blocks that a rank's shards overlap; only the files that hold them are fetched, and each is
used only if its bytes are those that were sealed.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer.state.blocks import DTYPES
from trainer.state.checkpoint import PROGRESS, Checkpoints, Seal, rank_file


def fill(reader: BlockReader, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint into tensors, in place; of a DTensor into the shard of this rank. No rank waits for another.

    What was filled may be used only after this has returned: only then is it known that the bytes are good.

    :param state: tensors by their names in the files (`weights/NAME`, `moments/NAME:exp_avg`).
    :raises DropforgeError, ValueError, KeyError: if it is broken. :raises StorageError: if it cannot be read now.
    :raises RuntimeError: if it lacks a tensor or has it in another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no process group takes part, as is meant here
            load(dict(state), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class BlockReader(StorageReader):
    """The files of one checkpoint, as torch's loader wants them.

    :param rank: what lies in several files is taken from this rank's.
    :ivar tensors: what it holds, by the names in the files; unchecked until it has been read.
    :raises ValueError: if a header is broken. :raises StorageError: if one cannot be read now.
    """

    def __init__(self, checkpoints: Checkpoints, seal: Seal, rank: int = 0) -> None:
        self._checkpoints = checkpoints
        self._seal = seal
        self._files: dict[MetadataIndex, str] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        own = rank_file(rank)
        try:
            for file in sorted(seal.files, key=lambda name: name != own):
                if file != PROGRESS:
                    self._read_header(file)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a file's header contradicts itself ({error!r})") from error

    def _read_header(self, file: str) -> None:
        """Which blocks there are; the bytes behind the headers are looked at only if a rank needs them."""
        header = self._headers[file] = self._checkpoints.header(self._seal, file)
        places = json.loads(header["__metadata__"]["blocks"])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape, offsets = entry["shape"], [0] * len(entry["shape"])
            if name in places:
                shape, offsets = places[name]["shape"], places[name]["offsets"]
            index = MetadataIndex(name, torch.Size(offsets))
            if index in self._files:
                continue
            if name not in self.tensors:
                kind = TensorProperties(dtype=DTYPES[entry["dtype"]])
                self.tensors[name] = TensorStorageMetadata(kind, torch.Size(shape), [])
            self.tensors[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(entry["shape"])))
            self._files[index] = file

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return False  # it is made for one checkpoint, and finds none by itself

    def reset(self, checkpoint_id: Any = None) -> None:
        del checkpoint_id

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(dict(self.tensors), storage_data=self._files)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        del metadata, is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[str, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            wanted[self._files[item.storage_index]][item.storage_index.fqn].append(item)
        for file, items in wanted.items():

            def take(name: str, values: torch.Tensor, items: dict[str, list[ReadItem]] = items) -> None:
                for item in items[name]:
                    part = values
                    for dimension, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dimension, offset, size)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)

            self._checkpoints.visit(self._seal, file, self._headers[file], items, take)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_whole(self, names: Iterable[str]) -> None:
        """:raises ValueError: if a tensor has gaps, which torch's planner would leave as they are."""
        for name in names:
            tensor = self.tensors[name]
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise ValueError(f"not all blocks are there of {name}")
