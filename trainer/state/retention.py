"""Which checkpoints stay: the newest ones and the best ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Kept(Protocol):
    """What decides about a checkpoint."""

    @property
    def step(self) -> int: ...

    @property
    def eval_loss(self) -> float | None: ...


def best_steps(seals: Sequence[Kept], best: int) -> list[int]:
    """Steps of the `best` checkpoints with the lowest evaluation loss, the best first; the earlier of equal ones.

    A checkpoint counts only if there was an evaluation at its very step.
    """
    measured = [(seal.eval_loss, seal.step) for seal in seals if _finite(seal.eval_loss)]
    return [step for _, step in sorted(measured)[:best]]


def which_go(seals: Sequence[Kept], last: int, best: int) -> list[int]:
    """Steps to delete: all but the `last` newest and the `best` best ones."""
    steps = sorted(seal.step for seal in seals)
    stay = {*steps[len(steps) - last :], *best_steps(seals, best)} if last < len(steps) else set(steps)
    return [step for step in steps if step not in stay]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
