"""The matrix of exactness: every combination of how a run may be shared, fed, cut and resumed.

A run must come to the same result in all of them. The whole is `make test-exact`; in `make test` runs a pairwise cover:
few cells that hold every pair of values of any two factors, which is where faults of combinations mostly lie
(https://doi.org/10.1109/TSE.2004.24).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Final


@dataclass(frozen=True)
class Cell:
    """One combination.

    :param mode: `compute.parallel`; `auto` is one rank alone.
    :param method: all weights of a base, adapters on it, or a model from a config.
    :param rows: packed, or one document a row. :param epochs: passes over the rows.
    :param resume: on as many ranks, on another number in another mode, or on as many past a broken newest checkpoint.
    """

    mode: str
    ranks: int
    method: str
    rows: str
    resume: str
    precision: str
    epochs: float

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


FACTORS: Final = {
    "mode": ("auto", "ddp", "fsdp", "fsdp-no-reshard", "hybrid"),
    "ranks": (1, 2, 4),
    "method": ("full", "lora", "config"),
    "rows": ("packed", "padded"),
    "resume": ("same", "other", "broken"),
    "precision": ("fp32", "bf16"),
    "epochs": (1.0, 2.5),
}
Pair = tuple[int, object, int, object]


def valid(cell: Cell) -> bool:
    """Whether a run is possible: one rank has nothing to share, and groups of two need four. The rest is refused."""
    return {"auto": cell.ranks == 1, "hybrid": cell.ranks == 4}.get(cell.mode, cell.ranks > 1)


def cells() -> list[Cell]:
    return [cell for cell in (Cell(*values) for values in product(*FACTORS.values())) if valid(cell)]  # type: ignore[arg-type]


def pairs(cell: Cell) -> set[Pair]:
    """What of any two factors a cell holds."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(astuple(cell)), 2)}


def cover(found: list[Cell]) -> list[Cell]:
    """Few cells that hold every pair: again and again the one with the most new pairs, the first of equals."""
    holds = {cell: pairs(cell) for cell in found}
    missing = set[Pair]().union(*holds.values())
    chosen: list[Cell] = []
    while missing:
        best = max(found, key=lambda cell: len(holds[cell] & missing))
        chosen.append(best)
        missing -= holds[best]
    return chosen
