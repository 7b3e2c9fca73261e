"""Which documents stand together in a pack: best-fit decreasing, on a histogram of their lengths.

Best-fit looks at lengths only, so documents of one length are placed together, and a million of them in a fraction of a
second (Krell et al. 2021, https://arxiv.org/abs/2107.02027, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pack = NDArray[np.int64]
Pattern = tuple[tuple[int, int], ...]  # lengths and how often each stands in the pack, the longest first


@dataclass(frozen=True)
class Packs:
    """Packs end to end.

    :param documents: (N,) int32, each document once.
    :param offsets: (P + 1,) int64; pack p is `documents[offsets[p]:offsets[p + 1]]`.
    """

    documents: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        np.save(folder / "documents.npy", self.documents)
        np.save(folder / "offsets.npy", self.offsets)

    @classmethod
    def load(cls, folder: Path) -> Packs:
        """Map saved arrays into memory."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("documents", "offsets")))

    def __getitem__(self, index: int) -> Pack:
        return self.documents[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)


def find_patterns(counts: NDArray[np.int64], size: int) -> list[tuple[Pattern, int]]:
    """What packs hold, and how many hold it: each document goes into the fullest pack that still has room.

    :param counts: documents of each length, at most `size` and at least 1. :param size: tokens of a pack.
    """
    by_room: list[list[tuple[Pattern, int]]] = [[] for _ in range(size + 1)]
    rooms = 0  # bit r is set if some pack has room for exactly r more tokens

    def put(room: int, pattern: Pattern, number: int) -> None:
        nonlocal rooms
        if number:
            by_room[room].append((pattern, number))
            rooms |= 1 << room if room else 0

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length << length
            room = (fitting & -fitting).bit_length() - 1 if fitting else size
            pattern, number = by_room[room].pop() if fitting else ((), left)
            if fitting and not by_room[room]:
                rooms &= ~(1 << room)
            # The fullest pack stays the fullest while it takes more of them, so it takes all that it can.
            each = room // length
            whole = min(number, left // each)
            rest = left - whole * each if whole < number else 0
            left -= whole * each + rest
            put(room - each * length, (*pattern, (length, each)), whole)
            put(room - rest * length, (*pattern, (length, rest)), int(rest > 0))
            if fitting:
                put(room, pattern, number - whole - (rest > 0))
    return sorted((item for room in by_room for item in room), reverse=True)


def pack(lengths: NDArray[np.int64], order: NDArray[np.int64], size: int) -> Packs:
    """Pack documents; those of one length are placed in the order given.

    :param lengths: tokens of all documents. :param order: those to pack; every one is 1 to `size` tokens long.
    """
    own = lengths[order]
    ordered = order[np.argsort(-own, kind="stable")].astype(np.int32)
    counts = np.bincount(own, minlength=size + 1)
    following = (len(own) - np.cumsum(counts)).tolist()  # where the next document of each length stands in `ordered`
    parts: list[NDArray[np.int32]] = []
    sizes: list[NDArray[np.int64]] = []
    for pattern, number in find_patterns(counts, size):
        columns = []
        for length, times in pattern:
            low = following[length]
            following[length] = low + number * times
            columns.append(ordered[low : following[length]].reshape(number, times))
        block = np.hstack(columns)
        parts.append(block.ravel())
        sizes.append(np.full(number, block.shape[1], dtype=np.int64))
    offsets = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
    return Packs(np.concatenate([np.zeros(0, np.int32), *parts]), offsets)


def pack_window(lengths: NDArray[np.int64], order: NDArray[np.int64], size: int) -> list[Pack]:
    """The same as a list of packs, those with the longest documents first."""
    found = pack(lengths, order, size)
    return [found[index] for index in range(len(found))]


def pad(count: int) -> Packs:
    """A row of its own for each of `count` documents."""
    return Packs(np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int64))
