"""Which documents stand together in which step: a pure function of the documents, the seed and the position.

The plan knows nothing of ranks. A step's packs are the same on one rank or eight, so a resume on another number of
ranks repeats and skips nothing.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError

Pack = NDArray[np.int64]
WINDOW: Final = 8192  # documents that are packed together; larger windows pack no better


def pack_window(lengths: NDArray[np.int64], order: NDArray[np.int64], size: int) -> list[Pack]:
    """Best-fit decreasing: each document goes into the fullest pack that still has room.

    :param order: documents of the window; every one is at most `size` tokens long.
    """
    by_room: list[list[list[int]]] = [[] for _ in range(size + 1)]
    rooms = 0  # bit r is set if some open pack has room for exactly r more tokens
    packs: list[list[int]] = []
    for index in order[np.argsort(-lengths[order], kind="stable")]:
        length = int(lengths[index])
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = size, []
            packs.append(pack)
        pack.append(int(index))
        room -= length
        if room:
            by_room[room].append(pack)
            rooms |= 1 << room
    return [np.array(pack, dtype=np.int64) for pack in packs]


@dataclass(eq=False)
class Plan:
    """The packs of every step.

    :param lengths: tokens of each document, :param targets: its target tokens.
    :param size: tokens of a pack.
    :param rows: packs per step, over all ranks.
    :param packed: False gives every document a row of its own.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    seed: int
    size: int
    rows: int
    packed: bool
    epochs: float
    max_steps: int | None
    _starts: list[int] = field(default_factory=lambda: [0], repr=False)
    _recent: dict[int, list[Pack]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise DataError("the train split", "no row has a token to learn from", "Check roles and texts of the drop")
        if int(self.lengths.max()) > self.size:
            raise DataError("the train split", "a document is longer than the sequence", "Tokenise it again")

    def epoch(self, index: int) -> list[Pack]:
        """The packs of one pass over the documents, in order."""
        if index not in self._recent:
            if len(self._recent) > 1:  # the epoch at hand and the next one are enough
                del self._recent[next(iter(self._recent))]
            self._recent[index] = self._pack(index)
        return self._recent[index]

    def _pack(self, epoch: int) -> list[Pack]:
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths)).astype(np.int64)
        if not self.packed:
            return [order[index : index + 1] for index in range(len(order))]
        packs: list[Pack] = []
        for low in range(0, len(order), WINDOW):
            window = pack_window(self.lengths, order[low : low + WINDOW], self.size)
            packs += [window[index] for index in generator.permutation(len(window))]
        return packs

    def _start(self, epoch: int) -> int:
        """Position of an epoch's first pack."""
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        return self._starts[epoch]

    @property
    def packs(self) -> int | None:
        """Packs in the whole training; None if `max_steps` decides."""
        if self.max_steps is not None:
            return None
        whole = math.floor(self.epochs)
        rest = self.epochs - whole
        return self._start(whole) + (math.ceil(rest * len(self.epoch(whole))) if rest else 0)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.max_steps if self.max_steps is not None else math.ceil((self.packs or 0) / self.rows)

    def step(self, index: int) -> list[Pack]:
        """Packs of one optimizer step; the last one of the training may have fewer."""
        low, high = index * self.rows, (index + 1) * self.rows
        if self.packs is not None:
            high = min(high, self.packs)
        found: list[Pack] = []
        epoch = 0
        while low < high:
            while self._start(epoch + 1) <= low:
                epoch += 1
            start = self._start(epoch)
            part = self.epoch(epoch)[low - start : high - start]
            found += part
            low += len(part)
        return found

    def passes(self, index: int) -> float:
        """Passes over the documents after `index` steps."""
        position = min(index * self.rows, self.packs or index * self.rows)
        epoch = 0
        while self._start(epoch + 1) <= position:
            epoch += 1
        return epoch + (position - self._start(epoch)) / len(self.epoch(epoch))

    def step_targets(self, index: int) -> int:
        """Target tokens of one step, over all ranks."""
        return sum(int(self.targets[pack].sum()) for pack in self.step(index))

    def filled(self) -> float:
        """Share of the first epoch's places that hold a token."""
        return float(self.lengths.sum()) / (len(self.epoch(0)) * self.size)

    def digest(self, content: str) -> str:
        """SHA-256 of what decides the order. :param content: digest of the documents themselves."""
        head = [content, self.seed, self.size, self.rows, self.packed, self.epochs, self.max_steps, self.steps]
        state = hashlib.sha256(repr(head).encode())
        for pack in self.epoch(0):
            state.update(pack.tobytes() + b"|")
        return state.hexdigest()


def share(packs: list[Pack], lengths: NDArray[np.int64], rank: int, world: int, micro: int) -> list[list[Pack]]:
    """A rank's micro-batches of one step. Every rank gets the same number of them, an empty one if packs run out.

    Packs are ordered by length first, so that rows of like length stand together and little is padded.
    """
    ordered = sorted(packs, key=lambda pack: -int(lengths[pack].sum()))
    mine = ordered[rank::world]
    count = math.ceil(math.ceil(len(ordered) / world) / micro)
    return [mine[index * micro : (index + 1) * micro] for index in range(count)]
