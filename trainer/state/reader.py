"""A sealed checkpoint for `torch.distributed.checkpoint`: any mesh and any number of ranks can read it.

torch's planner finds the blocks that a rank's shards overlap; only the files that hold them are fetched, and each is
used only if its bytes are those that were sealed.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dropforge.errors import DropforgeError
from dropforge.json_objects import parse_object
from dropforge.store import MissingObjectError
from trainer.state.blocks import DTYPES
from trainer.state.checkpoint import PROGRESS, Checkpoints, Seal, StorageError, rank_file


def fill(reader: BlockReader, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint into tensors, in place; of a DTensor into the shard of this rank. No rank waits for another.

    What was filled may be used only after this has returned: only then is it known that the bytes are good.

    :param state: tensors by their names in the files (`weights/NAME`, `moments/NAME:exp_avg`).
    :raises DropforgeError, ValueError, KeyError: if it is broken. :raises StorageError: if it cannot be read now.
    :raises RuntimeError: if it lacks a tensor or has it in another shape.
    """
    reader.expect(state)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no process group takes part, as is meant here
            load(dict(state), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class SpoiledCopyError(Exception):
    """A copy in the fast tier was found broken while it was used; it will not be used again."""


class Copies:
    """Where each file of a checkpoint is read from: the fast tier's copy while it is good, else the durable one.

    :param partly: whether files that are nowhere are left out; this rank may not need them.
    """

    def __init__(self, durable: Checkpoints, seal: Seal, fast: Checkpoints | None = None, partly: bool = False) -> None:
        self.durable, self.seal, self.partly = durable, seal, partly
        self._fast = fast
        self._spoiled: set[str] = set()

    def header(self, name: str) -> dict[str, Any] | None:
        """What a file says of its tensors, unchecked; None if it may be left out."""
        if self._in_fast(name):
            assert self._fast is not None
            try:
                return self._fast.header(self.seal, name)
            except (StorageError, DropforgeError, ValueError, KeyError, TypeError) as error:
                self._spoil(name, error)
        try:
            return self.durable.header(self.seal, name)
        except MissingObjectError:
            if self.partly:
                return None
            raise

    def visit(self, name: str, *more: Any) -> None:
        """See `Checkpoints.visit`. :raises SpoiledCopyError: if the fast tier's copy was broken: begin anew."""
        if not self._in_fast(name):
            self.durable.visit(self.seal, name, *more)
            return
        assert self._fast is not None
        try:
            self._fast.visit(self.seal, name, *more)
        except (StorageError, DropforgeError) as error:
            self._spoil(name, error)
            raise SpoiledCopyError(name) from error

    def file(self, name: str) -> bytes:
        """The whole of a file."""
        if self._in_fast(name):
            assert self._fast is not None
            try:
                return self._fast.file(self.seal, name)
            except (StorageError, DropforgeError) as error:
                self._spoil(name, error)
        return self.durable.file(self.seal, name)

    def verify(self) -> None:
        """Look at every byte there is. :raises DropforgeError: if a file is broken or gone."""
        for name in self.seal.files:
            place = self._fast if self._in_fast(name) and self._fast is not None else self.durable
            place.verify(self.seal, name)

    def _in_fast(self, name: str) -> bool:
        return self._fast is not None and name not in self._spoiled and self._fast.holds(self.seal, name)

    def _spoil(self, name: str, error: Exception) -> None:
        self._spoiled.add(name)
        self.durable.say(f"checkpoint step-{self.seal.step}: the fast tier's copy of {name} cannot be used ({error})")


class BlockReader(StorageReader):
    """The files of one checkpoint, as torch's loader wants them.

    :param rank: what lies in several files is taken from this rank's.
    :ivar tensors: what it holds, by the names in the files; unchecked until it has been read.
    :raises ValueError: if a header is broken. :raises StorageError: if one cannot be read now.
    """

    def __init__(self, copies: Copies, rank: int = 0) -> None:
        self._copies = copies
        self._needed: dict[str, int] = {}
        self._files: dict[MetadataIndex, str] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        own = rank_file(rank)
        try:
            for file in sorted(copies.seal.files, key=lambda name: name != own):
                if file != PROGRESS:
                    self._read_header(file)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a file's header contradicts itself ({error!r})") from error

    def _read_header(self, file: str) -> None:
        """Which blocks there are; the bytes behind the headers are looked at only if a rank needs them."""
        header = self._copies.header(file)
        if header is None:
            return
        self._headers[file] = header
        places = parse_object(header["__metadata__"]["blocks"], f"the blocks of {file}")
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

    def expect(self, state: Mapping[str, torch.Tensor]) -> None:
        """Note how many elements of each tensor this rank needs."""
        self._needed = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
            for name, tensor in state.items()
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found: dict[str, int] = defaultdict(int)
        for item in plan.items:
            found[item.storage_index.fqn] += item.lengths.numel()
        gaps = sorted(name for name, count in self._needed.items() if found[name] != count)
        if gaps:  # torch's planner would leave them as they are
            raise ValueError(f"not all blocks are there of {', '.join(gaps[:3])}")
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

            self._copies.visit(file, self._headers[file], items, take)
        done: Future[None] = Future()
        done.set_result(None)
        return done
