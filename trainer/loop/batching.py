"""How one optimizer step is spread over ranks and forward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dropforge.errors import RecipeError
from dropforge.text import counted


@dataclass(frozen=True)
class Batching:
    """
    :param rows: global batch. :param world: ranks.
    :param accumulation: forward passes per rank and step. :param micro_batch: most rows of one.
    """

    rows: int
    world: int
    accumulation: int
    micro_batch: int

    def __str__(self) -> str:
        return (
            f"one step: {counted(self.rows, 'row')} over {counted(self.world, 'rank')}, "
            f"{counted(self.accumulation, 'forward pass', 'forward passes')} each of up to "
            f"{counted(self.micro_batch, 'row')}"
        )


def solve(rows: int, world: int, most: int) -> Batching:
    """Spread a global batch of `rows` evenly over `world` ranks, at most `most` rows in a forward pass.

    :raises RecipeError: if there are more ranks than rows.
    """
    if world > rows:
        raise RecipeError(
            "recipe key `train.rows_per_step`",
            f"a step of {rows} rows leaves {world - rows} of {world} ranks idle",
            f"Raise it, or `train.tokens_per_step`, or use at most {rows} ranks",
        )
    own = math.ceil(rows / world)
    accumulation = math.ceil(own / most)
    return Batching(rows, world, accumulation, math.ceil(own / accumulation))
