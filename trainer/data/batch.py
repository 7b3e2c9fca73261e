"""A micro-batch as tensors: rows of documents end to end, each with its own positions, and no attention mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from trainer.data.plan import Pack
from trainer.data.tokens import Tokens

_MULTIPLE: Final = 8  # row lengths are rounded up, so that there are few shapes
_EMPTY: Final = 8


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass.

    :param ids: (B, L) int64 token ids. Of pairs sources stand in the first columns and targets in the others, each
        with its padding behind it.
    :param positions: (B, L) int64; they begin anew with each document, and with the padding. Of pairs (B, S), those of
        the S columns of sources alone: so the border is known without asking the device.
    :param places: (N,) int64 indices into the flattened (B * L) places that predict a target; where rows have labels,
        the last place of each row that is not padding.
    :param targets: (N,) int64 the ids to predict there, or the numbers of the rows' labels.
    :param documents: (N,) int64 index of each target's document, for evaluation.
    :param tokens: tokens that are not padding.
    :param labelled: whether targets are labels of whole rows.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor
    tokens: int
    labelled: bool = False

    @property
    def paired(self) -> bool:
        """Whether each row is a source and a target."""
        return self.positions.shape[1] != self.ids.shape[1]

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return Batch(
            move(self.ids),
            move(self.positions),
            move(self.places),
            move(self.targets),
            move(self.documents),
            self.tokens,
            self.labelled,
        )


def make_batch(tokens: Tokens, packs: list[Pack], pad: int) -> Batch:
    """Put packs into rows. Without packs: one row of padding and no target, so that a rank can keep step."""
    if tokens.paired:
        return _pairs(tokens, [int(pack[0]) for pack in packs], pad)
    lengths = [int(tokens.lengths[pack].sum()) for pack in packs]
    width = -(-max(lengths, default=_EMPTY) // _MULTIPLE) * _MULTIPLE
    ids = np.full((max(1, len(packs)), width), pad, dtype=np.int64)
    positions = np.zeros_like(ids)
    places, targets, documents = [], [], []
    for row in range(len(ids)):
        place = 0
        for index in packs[row] if packs else ():
            content, trained = tokens.document(int(index))
            ids[row, place : place + len(content)] = content
            positions[row, place : place + len(content)] = np.arange(len(content))
            if tokens.labels is None:
                wanted = np.flatnonzero(trained)
                places.append(row * width + place + wanted - 1)
                targets.append(content[wanted].astype(np.int64))
            else:
                wanted = np.zeros(1, dtype=np.int64)
                places.append(np.array([row * width + place + len(content) - 1]))
                targets.append(tokens.labels[index : index + 1].astype(np.int64))
            documents.append(np.full(len(wanted), index, dtype=np.int64))
            place += len(content)
        positions[row, place:] = np.arange(width - place)
    none = np.zeros(0, dtype=np.int64)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(np.concatenate(places) if places else none),
        torch.from_numpy(np.concatenate(targets) if targets else none),
        torch.from_numpy(np.concatenate(documents) if documents else none),
        sum(lengths),
        tokens.labels is not None,
    )


def _pairs(tokens: Tokens, chosen: list[int], pad: int) -> Batch:
    """Sources and targets side by side, each as wide as the longest of them."""
    heads = [int(tokens.lengths[index] - tokens.targets[index]) for index in chosen]
    sizes = [int(tokens.targets[index]) for index in chosen]
    border, width = (-(-max(found, default=_EMPTY) // _MULTIPLE) * _MULTIPLE for found in (heads, sizes))
    width += border
    ids = np.full((max(1, len(chosen)), width), pad, dtype=np.int64)
    positions = np.tile(np.arange(border), (len(ids), 1))
    places, targets, documents = [], [], []
    for row, (index, head, size) in enumerate(zip(chosen, heads, sizes, strict=True)):
        content, _ = tokens.document(index)
        ids[row, :head], ids[row, border : border + size] = content[:head], content[head:]
        positions[row, head:] = np.arange(border - head)
        places.append(row * width + border - 1 + np.arange(size))  # as elsewhere, the target stands one place on
        targets.append(content[head:].astype(np.int64))
        documents.append(np.full(size, index, dtype=np.int64))
    none = np.zeros(0, dtype=np.int64)
    found = [torch.from_numpy(np.concatenate(part) if part else none) for part in (places, targets, documents)]
    return Batch(torch.from_numpy(ids), torch.from_numpy(positions), found[0], found[1], found[2], sum(heads + sizes))
