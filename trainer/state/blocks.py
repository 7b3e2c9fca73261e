"""What a rank writes of the state: its shards, and its share of what all ranks hold alike.

One file per rank, in the safetensors format (https://github.com/huggingface/safetensors#format). A tensor that lies in
several files has its whole shape and the place of each block in the files' metadata, so that any number of ranks can
put it together again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors.torch import load
from torch.distributed.tensor import DTensor

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: kind for kind, name in _DTYPES.items()}
_ALIGNMENT: Final = 64  # bytes; the data of a file begin at a multiple of it
_SMALL: Final = 16  # bytes; what is no larger is cheaper written by every rank than looked for in another's file


@dataclass(frozen=True)
class Block:
    """A part of a tensor. :param shape: of the whole tensor. :param offsets: where `values` begin in it."""

    values: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return tuple(self.values.shape) == self.shape


def whole(tensor: torch.Tensor) -> Block:
    """A tensor as one block."""
    return Block(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


def own_blocks(
    state: Mapping[str, torch.Tensor], rank: int, world: int, node: tuple[int, int] | None = None
) -> dict[str, Block]:
    """What `rank` of `world` writes of a state; over all ranks each element exactly once.

    Of a DTensor it is the local shard, on the first of its replicas. Tensors that every rank holds whole are dealt out
    by size, the largest first, in the same way on every rank. Only counters are in the file of each: a rank that comes
    back to its shard need not open the files of all others for them.

    :param node: rank within the node and number of ranks there. Then the ranks of each node write all that they hold,
        without the help of other nodes.
    """
    found: dict[str, Block] = {}
    rank, world = node or (rank, world)
    loads = [0] * world
    for name, tensor in sorted(state.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            first = coordinate is not None and not any(
                node is None and place.is_replicate() and coordinate[index]
                for index, place in enumerate(tensor.placements)
            )
            local = tensor.to_local().detach()
            if first and local.numel():
                (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                found[name] = Block(local, tuple(tensor.shape), tuple(chunk.offsets))
            continue
        if tensor.nbytes <= _SMALL:
            found[name] = whole(tensor)
            continue
        owner = loads.index(min(loads))
        loads[owner] += tensor.nbytes
        if owner == rank:
            found[name] = whole(tensor)
    return found


class Staging:
    """A rank's file as one buffer: laid out once, then filled anew by each save.

    The copy into it is all that a step waits for. On a GPU's machine it is page-locked.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._layout: list[Any] | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def fill(self, blocks: Mapping[str, Block]) -> memoryview:
        """Copy the blocks; the bytes of the file, valid until the next call."""
        # Wide elements first: safetensors allows no gaps, and each view must begin at a multiple of its width.
        ordered = sorted(blocks.items(), key=lambda item: (-item[1].values.element_size(), item[0]))
        layout = [(name, part.values.dtype, part.values.shape, part.shape, part.offsets) for name, part in ordered]
        if layout != self._layout:
            self._lay_out(ordered)
            self._layout = layout
        devices = set()
        for name, part in ordered:
            self._views[name].copy_(part.values, non_blocking=True)
            devices.add(part.values.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return memoryview(self._buffer.numpy())  # type: ignore[arg-type]

    def _lay_out(self, ordered: list[tuple[str, Block]]) -> None:
        header: dict[str, Any] = {}
        places: dict[str, Any] = {}
        spans = []
        end = 0
        for name, part in ordered:
            begin, end = end, end + part.values.nbytes
            shape = list(part.values.shape)
            header[name] = {"dtype": _DTYPES[part.values.dtype], "shape": shape, "data_offsets": [begin, end]}
            if not part.whole:
                places[name] = {"shape": list(part.shape), "offsets": list(part.offsets)}
            spans.append((name, part, begin, end))
        header["__metadata__"] = {"format": "pt", "blocks": json.dumps(places)}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        self._views = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        self._buffer = torch.empty(len(head) + end, dtype=torch.uint8, pin_memory=self._pinned)
        self._buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for name, part, begin, stop in spans:
            piece = self._buffer[len(head) + begin : len(head) + stop]
            self._views[name] = piece.view(part.values.dtype).view(part.values.shape)


def read_blocks(data: bytes) -> dict[str, Block]:
    """The blocks of one file. :raises ValueError: if it is no such file."""
    try:
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        places = json.loads(head["__metadata__"]["blocks"])
        return {
            name: Block(values, tuple(places[name]["shape"]), tuple(places[name]["offsets"]))
            if name in places
            else whole(values)
            for name, values in load(data).items()
        }
    except Exception as error:  # safetensors raises a kind of its own, straight from Exception
        raise ValueError(f"it is no file of a state ({error})") from error


def join(files: Iterable[Mapping[str, Block]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the blocks of all files.

    :raises ValueError: if a tensor has gaps.
    """
    found: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for blocks in files:
        for name, part in blocks.items():
            if part.whole:
                found[name] = part.values
                missing[name] = 0
                continue
            if name not in found:
                found[name] = torch.empty(part.shape, dtype=part.values.dtype)
                missing[name] = found[name].numel()
            place = found[name]
            for dimension, (offset, size) in enumerate(zip(part.offsets, part.values.shape, strict=True)):
                place = place.narrow(dimension, offset, size)
            place.copy_(part.values)
            missing[name] -= part.values.numel()
    gaps = sorted(name for name, count in missing.items() if count)
    if gaps:
        raise ValueError(f"not all blocks are there of {', '.join(gaps[:3])}")
    return found
