"""How a step's packs are dealt to ranks: to each about the same work, and equally many micro-batches."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer.data.packing import Pack

PER_WIDTH: Final = 12.0  # see `costs`
LINEAR: Final = 1024 * PER_WIDTH  # weight of a token for a model whose width is not known


def share(
    packs: list[Pack], lengths: NDArray[np.int64], rank: int, world: int, micro: int, linear: float = LINEAR
) -> list[list[Pack]]:
    """A rank's micro-batches of one step. Every rank gets the same number of them, an empty one if packs run out.

    Ranks get equally many packs, one more or less, and about the same work. A rank's packs are ordered by length, so
    that rows of like length stand together and little is padded.
    """
    own = sorted(spread(costs(packs, lengths, linear), world)[rank])
    mine = sorted((packs[index] for index in own), key=lambda pack: -int(lengths[pack].sum()))
    count = math.ceil(math.ceil(len(packs) / world) / micro)
    return [mine[index * micro : (index + 1) * micro] for index in range(count)]


def costs(packs: list[Pack], lengths: NDArray[np.int64], linear: float) -> list[float]:
    """Work of each pack: the squares of its documents' lengths, and `linear` for each of its tokens.

    A layer of width h takes about 24 h^2 operations for a token and 4 h for each pair of tokens, of which a causal mask
    leaves half the square of the length: so a token weighs `PER_WIDTH` h beside 1 for the square.
    """
    return [float((lengths[pack] ** 2).sum() + linear * lengths[pack].sum()) for pack in packs]


def spread(costs: list[float], world: int) -> list[list[int]]:
    """Deal items to `world` ranks, equally many to each but for one, so that the most loaded one has little.

    The costliest first, each to the rank with the least load that has room (Graham 1969, with a limit on the number);
    or in turn, where that leaves the most loaded rank with less. The same on every rank.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    in_turn = [order[rank::world] for rank in range(world)]
    least, longer = divmod(len(order), world)
    dealt: list[list[int]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for index in order:
        open_ranks = [r for r in range(world) if len(dealt[r]) < least or (longer and len(dealt[r]) == least)]
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        longer -= len(dealt[rank]) == least
        dealt[rank].append(index)
        loads[rank] += costs[index]
    return min(dealt, in_turn, key=lambda parts: max(sum(costs[index] for index in part) for part in parts))
