"""What kept a finished training from going faster, from its own figures. Pure.

Each sign is the share of the steps' time that it cost; the largest that is above its bound gives the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

Health = Literal["healthy", "data-bound", "communication-bound", "throttled", "unknown"]
HEALTHS: Final[tuple[Health, ...]] = ("healthy", "data-bound", "communication-bound", "throttled", "unknown")

DATA: Final = 0.15
"""Share of the steps' time in which rank 0 made batches."""
COMMUNICATION: Final = 0.25
"""The same for waiting for other ranks, without what the slowest rank explains."""
UNEVEN: Final = 0.2
"""The share that the fastest rank waits for the slowest: 0.2 is 1.25 times as long."""
SAME: Final = 0.75
"""Share of the log steps in which one rank is the slowest, from which it is slow and not unlucky."""
SLOWER: Final = 0.2
"""The share by which the work of a token took longer in the second half than in the first."""
SLOWED: Final = 0.1
"""Share of the samples in which a GPU's driver says that heat or power made it slower."""
_HALVES: Final = 8  # log steps from which the two halves are compared
_WARM: Final = 3  # log steps from which the first is left out: it has compiled, read ahead and filled caches

Points = Mapping[int, float]
"""Values by step."""


@dataclass(frozen=True)
class Figures:
    """A training's log steps, each by its step; what it did not tell is empty.

    :param seconds: of a step; `data`, `gradients` and `collective` are parts of it.
    :param speed: tokens per second.
    :param spread: how many times as long the slowest rank, which is `slowest`, worked as the fastest.
    :param slowed: for each GPU, the share of its samples in which heat or power made it slower.
    """

    seconds: Points = field(default_factory=dict)
    data: Points = field(default_factory=dict)
    gradients: Points = field(default_factory=dict)
    collective: Points = field(default_factory=dict)
    speed: Points = field(default_factory=dict)
    spread: Points = field(default_factory=dict)
    slowest: Points = field(default_factory=dict)
    slowed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """:param shares: of the steps' time, by sign; without what is not known. :param words: the reason, for people."""

    health: Health
    words: str
    shares: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.health}: {self.words}"

    def metrics(self) -> dict[str, float]:
        """The shares as MLflow's metrics."""
        return {f"health/{name}_share": round(share, 4) for name, share in self.shares.items()}


@dataclass(frozen=True)
class _Sign:
    name: str
    health: Health
    bound: float
    share: float
    words: str


def judge(figures: Figures) -> Verdict:
    """The verdict on a training."""
    steps = sorted(figures.seconds)[1 if len(figures.seconds) >= _WARM else 0 :]
    whole = sum(figures.seconds[step] for step in steps)
    if whole <= 0:
        return Verdict("unknown", "the training logged no step")
    signs = [*_waits(figures, steps, whole), *_slowed(figures, steps)]
    shares = {sign.name: sign.share for sign in signs}
    worst = max(signs, key=lambda sign: sign.share / sign.bound)
    if worst.share >= worst.bound:
        return Verdict(worst.health, worst.words, shares)
    data = f"{shares['data']:.0%} of the steps' time went into batches"
    waits = f", {shares['communication']:.0%} into waiting for other ranks" if "communication" in shares else ""
    return Verdict("healthy", f"{data}{waits}", shares)


def _waits(figures: Figures, steps: Sequence[int], whole: float) -> list[_Sign]:
    data = _sum(figures.data, steps) / whole
    found = [_Sign("data", "data-bound", DATA, data, f"{data:.0%} of the steps' time went into making batches")]
    spread = [figures.spread[step] for step in steps if figures.spread.get(step, 0.0) >= 1]
    uneven = 1 - 1 / median(spread) if spread else 0.0
    slow = Counter(int(figures.slowest[step]) for step in steps if step in figures.slowest).most_common(1)
    if spread and slow and slow[0][1] >= SAME * len(steps):
        words = f"rank {slow[0][0]} took {median(spread):.2f} times as long as the fastest, waiting left out"
        found.append(_Sign("uneven", "throttled", UNEVEN, uneven, words))
    if figures.gradients or figures.collective:
        waited = (_sum(figures.gradients, steps) + _sum(figures.collective, steps)) / whole
        # A rank that waits for a slower one waits for no network.
        network = max(0.0, waited - uneven)
        words = f"{network:.0%} of the steps' time went into waiting for other ranks that were not slower"
        found.append(_Sign("communication", "communication-bound", COMMUNICATION, network, words))
    return found


def _slowed(figures: Figures, steps: Sequence[int]) -> list[_Sign]:
    found = []
    if figures.slowed:
        worst = max(figures.slowed, key=lambda name: figures.slowed[name])
        share = figures.slowed[worst]
        words = f"{worst} was slowed by heat or power in {share:.0%} of its samples"
        found.append(_Sign("slowed", "throttled", SLOWED, share, words))
    work = [_work(figures, step) for step in steps if figures.speed.get(step, 0.0) * figures.seconds[step] > 0]
    if len(work) >= _HALVES:
        first, second = median(work[: len(work) // 2]), median(work[len(work) // 2 :])
        if first > 0 and second > 0:
            share = max(0.0, 1 - first / second)
            words = (
                f"a token took {second / first:.2f} times as long in the second half as in the first, waits left out"
            )
            found.append(_Sign("slower", "throttled", SLOWER, share, words))
    return found


def _work(figures: Figures, step: int) -> float:
    """Seconds of work on a token."""
    waits = sum(part.get(step, 0.0) for part in (figures.data, figures.gradients, figures.collective))
    return max(0.0, figures.seconds[step] - waits) / (figures.speed[step] * figures.seconds[step])


def _sum(points: Points, steps: Sequence[int]) -> float:
    return sum(points.get(step, 0.0) for step in steps)
