"""How sure a difference between two models is that were measured on the same rows: the paired bootstrap.

B. Efron, Bootstrap methods: another look at the jackknife (https://doi.org/10.1214/aos/1176344552); for two systems on
one test set P. Koehn, Statistical significance tests for machine translation evaluation
(https://aclanthology.org/W04-3250/). Rows are drawn with replacement, both models are judged by the same draw, and
figures are computed anew from the sums of the rows drawn: tokens of one row never part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dropforge.promotion import LEAST_ROWS

Floats: TypeAlias = NDArray[np.float64]

RESAMPLES: Final = 5000
_SEED: Final = 20040725
_DRAWS: Final = 1 << 21  # rows drawn at a time, which bounds the memory
_NOTHING: Final = 1e-9  # what a champion's value of 0 counts as, so that a gain over it is finite


class Figure(Protocol):
    """A model's metric as a function of how often each row counts."""

    def measured(self) -> NDArray[np.bool_]:
        """(N,) the rows that count at all."""

    def take(self, rows: NDArray[np.int64]) -> Figure:
        """The figure of some of the rows. :param rows: (K,) their places."""

    def values(self, weights: Floats) -> Floats:
        """(R,) its values; NaN where nothing counts. :param weights: (R, N) how often each row counts."""


@dataclass(frozen=True)
class Ratio:
    """A sum over a sum, such as nats over tokens; a mean is one over rows.

    :param above, below: (N,) what each row adds; 0 and 0 of a row that was not measured.
    :param exponential: whether the metric is e to this (perplexity).
    """

    above: Floats
    below: Floats
    exponential: bool = False

    def measured(self) -> NDArray[np.bool_]:
        return np.asarray(self.below > 0)

    def take(self, rows: NDArray[np.int64]) -> Ratio:
        return Ratio(self.above[rows], self.below[rows], self.exponential)

    def values(self, weights: Floats) -> Floats:
        total = weights @ self.below
        found = np.divide(weights @ self.above, total, out=np.full(len(weights), math.nan), where=total > 0)
        return np.asarray(np.exp(np.minimum(found, 700.0)) if self.exponential else found)


@dataclass(frozen=True)
class MacroF1:
    """The mean of F1 over the labels that are there or given, as `trainer.measure.macro_f1`.

    :param there, given: (N,) numbers of the labels that rows have and were given; -1 of a row that was not measured.
    """

    there: NDArray[np.int64]
    given: NDArray[np.int64]

    def measured(self) -> NDArray[np.bool_]:
        return np.asarray(self.there >= 0)

    def take(self, rows: NDArray[np.int64]) -> MacroF1:
        return MacroF1(self.there[rows], self.given[rows])

    def values(self, weights: Floats) -> Floats:
        rows = np.flatnonzero(self.measured())
        there, given, weights = self.there[rows], self.given[rows], weights[:, rows]
        labels = int(max(there.max(initial=0), given.max(initial=0))) + 1
        right = np.flatnonzero(there == given)

        def counts(label: NDArray[np.int64], chosen: Floats) -> Floats:
            return np.array([np.bincount(label, weight, labels) for weight in chosen])

        either = counts(there, weights) + counts(given, weights)
        f1 = np.divide(2 * counts(there[right], weights[:, right]), either, out=np.zeros_like(either), where=either > 0)
        known = (either > 0).sum(axis=1)
        return np.asarray(np.divide(f1.sum(axis=1), known, out=np.full(len(weights), math.nan), where=known > 0))


@dataclass(frozen=True)
class Interval:
    """How much better the candidate is, as a fraction of the champion's value.

    :param rows: that were drawn from. :param value: on these rows; above 0 is better.
    :param low, high: the ends of the central interval; None of fewer than `LEAST_ROWS` rows.
    """

    rows: int
    value: float
    low: float | None
    high: float | None


def gain(candidate: Figure, champion: Figure, *, lower: bool, confidence: float) -> Interval:
    """The gain of one model over the other with its percentile interval; the same for the same rows, always.

    :param lower: whether lower values are the better ones. :param confidence: of the interval, as 0.95.
    """
    # A row that one of them could not read counts for the other: so both figures are those that are told.
    rows = np.flatnonzero(candidate.measured() | champion.measured())
    mine, theirs = candidate.take(rows), champion.take(rows)

    def gains(weights: Floats) -> Floats:
        ours, reference = mine.values(weights), theirs.values(weights)
        better = reference - ours if lower else ours - reference
        return better / np.maximum(np.abs(reference), _NOTHING)

    value = float(gains(np.ones((1, len(rows))))[0])
    if len(rows) < LEAST_ROWS:
        return Interval(len(rows), value, None, None)
    found = np.concatenate([gains(weights) for weights in resamples(len(rows))])
    found = np.sort(found[~np.isnan(found)])
    if not len(found):
        return Interval(len(rows), value, None, None)
    outside = (1 - confidence) / 2
    low = math.floor(outside * len(found))
    return Interval(len(rows), value, float(found[low]), float(found[len(found) - 1 - low]))


def resamples(rows: int, count: int = RESAMPLES, seed: int = _SEED) -> Iterator[Floats]:
    """Draws of as many rows as there are, some at a time: (R, N) how often each was drawn."""
    # Unlike a generator's methods, its raw stream is the same in every NumPy.
    source = np.random.PCG64(seed)
    most = max(1, _DRAWS // rows)
    for start in range(0, count, most):
        size = min(most, count - start)
        raw = source.random_raw(size * rows) >> np.uint64(32)
        drawn = ((raw * np.uint64(rows)) >> np.uint64(32)).astype(np.int64)
        drawn += np.repeat(np.arange(size) * rows, rows)
        yield np.bincount(drawn, minlength=size * rows).reshape(size, rows).astype(np.float64)
