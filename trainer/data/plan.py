"""Which documents stand together in which step: a pure function of the documents, the seed and the position.

Which lengths share a pack is found once. Every pass deals the documents of one length anew to the places of that
length, and shuffles the packs. So all passes have equally many packs, and any of them is known without those before it.

The plan knows nothing of ranks. A step's packs are the same on one rank or eight, so a resume on another number of
ranks repeats and skips nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError
from trainer.data.balance import LINEAR, share
from trainer.data.mix import Mix
from trainer.data.packing import Pack, Packs, pack, pad

__all__ = ["Epoch", "Pack", "Plan", "make_packs"]

_ORDER: Final = 1  # of the rules below; another one is another plan


def make_packs(lengths: NDArray[np.int64], size: int, packed: bool, mix: Mix | None) -> Packs:
    """The packs of all documents; with a mix those of each source by themselves, source after source.

    :raises DataError: if there is no document, or one that is longer than a pack.
    """
    if not len(lengths):
        raise DataError("the train split", "no row has a token to learn from", "Check roles and texts of the drop")
    if int(lengths.max()) > size:
        raise DataError("the train split", "a document is longer than the sequence", "Tokenise it again")
    if mix is None:
        return pack(lengths, np.arange(len(lengths)), size) if packed else pad(len(lengths))
    found = []
    for index in range(len(mix.names)):
        order = np.flatnonzero(mix.source == index)
        alone = Packs(order.astype(np.int32), np.arange(len(order) + 1, dtype=np.int64))
        found.append(pack(lengths, order, size) if packed else alone)
    ends = np.cumsum([0, *(len(part.documents) for part in found)])
    offsets = [part.offsets[1:] + end for part, end in zip(found, ends, strict=False)]
    return Packs(np.concatenate([part.documents for part in found]), np.concatenate([np.zeros(1, np.int64), *offsets]))


class _Source:
    """An endless sequence of packs: pass after pass over the same documents.

    :param number: of the source; each has random numbers of its own.
    :param passes: how often an epoch goes through it.
    """

    def __init__(self, number: int, packs: Packs, lengths: NDArray[np.int64], passes: float) -> None:
        self.number, self.packs, self.passes = number, packs, passes
        self.take = max(1, round(passes * len(packs))) if passes else 0
        own = lengths[packs.documents]
        self.tokens = int(own.sum())
        self.places = np.argsort(-own, kind="stable")  # of the documents, by length
        ordered = own[self.places]
        kind = np.cumsum(np.concatenate([[0], ordered[1:] != ordered[:-1]]))
        self.kind = kind.astype(np.uint16 if kind[-1] < 1 << 16 else np.int64)  # numpy sorts 16 bits by radix

    def deal(self, seed: int, turn: int) -> NDArray[np.int32]:
        """The documents of pass `turn`, pack after pack."""
        dice = _shuffle(seed, 0, self.number, turn, count=len(self.places))
        among = dice[np.argsort(self.kind[dice], kind="stable")]  # each takes the place of one of its length
        dealt = np.empty_like(self.packs.documents)
        dealt[self.places] = self.packs.documents[self.places[among]]
        return dealt


def _shuffle(*seed: int, count: int) -> NDArray[np.int64]:
    """A permutation. NumPy keeps the raw stream of a bit generator over all versions, unlike `Generator.permutation`.

    See NEP 19, https://numpy.org/neps/nep-0019-rng-policy.html.
    """
    raw = np.random.Philox(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class Epoch:
    """The packs of an epoch in their order: pack i is `documents[starts[i]:ends[i]]`.

    :param bounds: for each source that is in it, how often a document of it stands there at least and at most.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bounds: Mapping[int, tuple[int, int]]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Pack:
        return self.documents[self.starts[index] : self.ends[index]].astype(np.int64)

    def times(self, documents: int) -> NDArray[np.int64]:
        """(N,) how often each of `documents` documents is in it."""
        total = len(self.documents)
        edges = np.bincount(self.starts, minlength=total + 1) - np.bincount(self.ends, minlength=total + 1)
        inside = np.cumsum(edges[:-1])
        return np.bincount(np.repeat(self.documents, inside), minlength=documents)


@dataclass(eq=False)
class Plan:
    """The packs of every step.

    :param lengths: tokens of each document, :param targets: its target tokens.
    :param size: tokens of a pack.
    :param rows: packs per step, over all ranks.
    :param packed: False gives every document a row of its own.
    :param mix: sources with passes of their own; without it all documents are one source, passed once in an epoch.
    :param packs_of: what `make_packs` found, made here if not given.
    :param linear: see `trainer.data.balance.costs`.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    seed: int
    size: int
    rows: int
    packed: bool
    epochs: float
    max_steps: int | None
    mix: Mix | None = None
    packs_of: Packs | None = None
    linear: float = LINEAR
    _recent: dict[int, Epoch] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.packs_of is None:
            self.packs_of = make_packs(self.lengths, self.size, self.packed, self.mix)
        self._sources = self._split(self.packs_of)
        self.packs_per_epoch = sum(source.take for source in self._sources)

    def _split(self, packs: Packs) -> list[_Source]:
        if self.mix is None:
            return [_Source(0, packs, self.lengths, 1.0)]
        first = self.mix.source[packs.documents[packs.offsets[:-1]]]  # the source of each pack
        bounds = np.searchsorted(first, np.arange(len(self.mix.names) + 1)).tolist()
        found = []
        for number, (low, high) in enumerate(pairwise(bounds)):
            offsets = packs.offsets[low : high + 1]
            if high > low:
                own = Packs(packs.documents[offsets[0] : offsets[-1]], offsets - offsets[0])
                found.append(_Source(number, own, self.lengths, self.mix.passes[number]))
        return found

    def epoch(self, index: int) -> Epoch:
        """The packs of one epoch, in order."""
        if index not in self._recent:
            if len(self._recent) > 1:  # the epoch at hand and the next one are enough
                del self._recent[next(iter(self._recent))]
            self._recent[index] = self._make(index)
        return self._recent[index]

    def _make(self, epoch: int) -> Epoch:
        documents: list[NDArray[np.int32]] = []
        starts: list[NDArray[np.int64]] = []
        ends: list[NDArray[np.int64]] = []
        bounds: dict[int, tuple[int, int]] = {}
        base = 0
        for source in self._sources:
            count = len(source.packs)
            low, high = epoch * source.take, (epoch + 1) * source.take
            turns = range(low // count, -(-high // count))
            bounds[source.number] = (max(0, high // count - -(-low // count)), len(turns))
            for turn in turns:
                # A source's next pass begins where its last one has ended, also in the middle of an epoch.
                part = slice(max(low - turn * count, 0), min(high - turn * count, count))
                order = _shuffle(self.seed, 1, source.number, turn, count=count)[part]
                documents.append(source.deal(self.seed, turn))
                starts.append(source.packs.offsets[order] + base)
                ends.append(source.packs.offsets[order + 1] + base)
                base += len(documents[-1])
        found = Epoch(np.concatenate(documents), np.concatenate(starts), np.concatenate(ends), bounds)
        if len(self._sources) == 1:
            return found
        order = _shuffle(self.seed, 2, epoch, count=len(found))
        return Epoch(found.documents, found.starts[order], found.ends[order], bounds)

    @property
    def packs(self) -> int | None:
        """Packs in the whole training; None if `max_steps` decides."""
        if self.max_steps is not None:
            return None
        whole = math.floor(self.epochs)
        return whole * self.packs_per_epoch + math.ceil((self.epochs - whole) * self.packs_per_epoch)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.max_steps if self.max_steps is not None else math.ceil((self.packs or 0) / self.rows)

    def step(self, index: int) -> list[Pack]:
        """Packs of one optimizer step; the last one of the training may have fewer."""
        low, high = index * self.rows, (index + 1) * self.rows
        if self.packs is not None:
            high = min(high, self.packs)
        places = (divmod(position, self.packs_per_epoch) for position in range(low, high))
        return [self.epoch(epoch)[place] for epoch, place in places]

    def passes(self, index: int) -> float:
        """Epochs done after `index` steps."""
        position = min(index * self.rows, self.packs or index * self.rows)
        whole, rest = divmod(position, self.packs_per_epoch)
        return whole + rest / self.packs_per_epoch

    def filled(self) -> float:
        """Share of the places that hold a token, over one epoch."""
        tokens = sum(source.tokens * source.take / len(source.packs) for source in self._sources)
        return tokens / (self.packs_per_epoch * self.size)

    def mixture(self) -> dict[str, dict[str, float]]:
        """For each source its documents, the passes asked for and got, and its share of an epoch's tokens."""
        if self.mix is None:
            return {}
        tokens = {one.number: one.tokens * one.take / len(one.packs) for one in self._sources}
        return {
            self.mix.names[one.number]: {
                "documents": len(one.packs.documents),
                "passes_asked": one.passes,
                "passes": round(one.take / len(one.packs), 4),
                "token_share": round(tokens[one.number] / sum(tokens.values()), 4),
            }
            for one in self._sources
        }

    def digest(self, content: str) -> str:
        """SHA-256 of what decides the order. :param content: digest of the documents themselves."""
        mix = None if self.mix is None else (self.mix.names, self.mix.passes)
        counts = [self.epochs, self.max_steps, self.steps, self.packs_per_epoch]
        head = [_ORDER, content, self.seed, self.size, self.rows, self.packed, mix, *counts]
        state = hashlib.sha256(repr(head).encode())
        first = self.epoch(0)
        for array in (first.documents, first.starts, first.ends):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def share(self, packs: list[Pack], rank: int, world: int, micro: int) -> list[list[Pack]]:
        """A rank's micro-batches of one step, see `trainer.data.balance.share`."""
        return share(packs, self.lengths, rank, world, micro, self.linear)
