"""The matrix of exactness: every combination of how a run may be shared, fed, cut and resumed.

A run must come to the same result in all of them. `make test-exact` runs the whole, `make test-slow` a cover of pairs:
few cells that hold every pair of values of any two factors, which is where faults of combinations mostly lie
(https://doi.org/10.1109/TSE.2004.24).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import combinations, product
from typing import Final


@dataclass(frozen=True)
class Cell:
    """One combination.

    :param mode: `compute.parallel`; `auto` is one rank alone.
    :param method: all weights of a base, adapters on it, or a model from a config.
    :param rows: packed, or one document a row. :param epochs: passes over the rows.
    :param resume: on as many ranks, on another number in another mode, or on as many past a broken newest checkpoint.
    :param optimizer, recompute: `train.optimizer` and `train.activation_checkpointing`.
    """

    mode: str
    ranks: int
    method: str
    rows: str
    resume: str
    precision: str
    epochs: float
    optimizer: str = "adamw"
    recompute: str = "none"

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
# Values of these are in the cover only: a whole matrix of them would take nine times as long, and what they change does
# not depend on how a run is cut. So is fp16, which differs from bf16 by its loss scale.
MORE: Final = {
    "optimizer": ("adamw", "adamw-bf16", "sgd"),
    "recompute": ("none", "selective", "full"),
}
NARROW: Final = {"bf16": ("fp16",)}
Pair = tuple[int, object, int, object]


def valid(cell: Cell) -> bool:
    """Whether a run is possible: one rank has nothing to share, and groups of two need four. The rest is refused."""
    return {"auto": cell.ranks == 1, "hybrid": cell.ranks == 4}.get(cell.mode, cell.ranks > 1)


def cells() -> list[Cell]:
    """The matrix, with the first of each of the `MORE` values and the epochs in turn.

    How often a row comes is the plan's work alone, and the order of all plans has its own tests: neighbours that differ
    in one other factor differ in the epochs too, so that every two values of the others meet with both.
    """
    return [cell for cell in _possible() if (sum(_places(cell)) % len(FACTORS["epochs"])) == 0]


def _possible() -> list[Cell]:
    return [cell for cell in (Cell(*values) for values in product(*FACTORS.values())) if valid(cell)]  # type: ignore[arg-type]


def _places(cell: Cell) -> list[int]:
    """Of each of a cell's values among those of its factor."""
    return [values.index(getattr(cell, name)) for name, values in FACTORS.items()]


def wide_cells() -> list[Cell]:
    """All that is possible, with all values."""
    return [
        replace(cell, precision=precision, **dict(zip(MORE, values, strict=True)))
        for cell in _possible()
        for precision in (cell.precision, *NARROW.get(cell.precision, ()))
        for values in product(*MORE.values())
    ]


def pairs(cell: Cell) -> set[Pair]:
    """What of any two factors a cell holds."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(vars(cell).values()), 2)}


def cover(found: list[Cell]) -> list[Cell]:
    """Few cells that hold every pair: again and again the one with the most new pairs, the first of equals."""
    numbers: dict[
        Pair, int
    ] = {}  # a set as the bits of a number: thousands of cells are looked at for each that is chosen
    holds = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(cell)) for cell in found]
    missing = (1 << len(numbers)) - 1
    chosen: list[Cell] = []
    while missing:
        best = max(range(len(found)), key=lambda index: (holds[index] & missing).bit_count())
        chosen.append(found[best])
        missing &= ~holds[best]
    return chosen
