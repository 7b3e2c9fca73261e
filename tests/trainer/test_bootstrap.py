"""How sure a gain is: intervals beside scipy's and the textbook's, rows that stay whole, and the same answer always."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dropforge.promotion import LEAST_ROWS
from trainer.bootstrap import RESAMPLES, Figure, MacroF1, Ratio, gain, resamples
from trainer.measure import macro_f1

ROWS = 300


def losses(seed: int, better: float, rows: int = ROWS) -> tuple[Ratio, Ratio]:
    """Candidate and champion: rows of uneven length, hard ones hard for both."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(3, 90, rows).astype(float)
    champion = tokens * generator.gamma(4, 0.5, rows)
    candidate = champion * (1 - better) + np.sqrt(tokens) * generator.normal(0, 0.5, rows)
    return Ratio(candidate, tokens), Ratio(champion, tokens)


def test_the_interval_is_that_of_scipy() -> None:
    candidate, champion = losses(1, 0.03)

    def share(mine: np.ndarray, theirs: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
        loss, reference = mine.sum(axis) / tokens.sum(axis), theirs.sum(axis) / tokens.sum(axis)
        return (reference - loss) / np.abs(reference)

    data = (candidate.above, champion.above, champion.below)
    peer = stats.bootstrap(data, share, paired=True, n_resamples=20_000, method="percentile", random_state=3)
    found = gain(candidate, champion, lower=True, confidence=0.95)
    assert found.rows == ROWS
    assert found.value == pytest.approx(float(share(*data)))
    width = peer.confidence_interval.high - peer.confidence_interval.low
    assert found.low == pytest.approx(peer.confidence_interval.low, abs=0.05 * width)
    assert found.high == pytest.approx(peer.confidence_interval.high, abs=0.05 * width)


def test_an_interval_misses_the_truth_as_often_as_it_says() -> None:
    missed = 0
    for seed in range(200):
        found = gain(*losses(seed, 0.02, rows=120), lower=True, confidence=0.9)
        assert found.low is not None
        assert found.high is not None
        missed += not found.low <= 0.02 <= found.high
    assert 8 <= missed <= 36  # 20 are to be expected; so far off is less likely than one in a thousand


def test_tokens_of_a_row_never_part() -> None:
    candidate, champion = losses(2, 0.02)
    whole = gain(candidate, champion, lower=True, confidence=0.95)

    def parted(ratio: Ratio) -> Ratio:
        return Ratio(np.repeat(ratio.above, 9) / 9, np.repeat(ratio.below, 9) / 9)

    parts = gain(parted(candidate), parted(champion), lower=True, confidence=0.95)
    assert parts.value == pytest.approx(whole.value)
    assert whole.low is not None
    assert parts.low is not None
    # As nine rows each, the same tokens would seem to say three times as much.
    assert (parts.value - parts.low) * 2.5 < whole.value - whole.low


def test_the_same_rows_give_the_same_interval() -> None:
    first, again = (gain(*losses(4, 0.01), lower=True, confidence=0.95) for _ in range(2))
    assert first == again
    wider = gain(*losses(4, 0.01), lower=True, confidence=0.99)
    assert wider.low is not None
    assert first.low is not None
    assert wider.low < first.low
    [draw] = resamples(5, count=2)
    assert draw.tolist() == [[3, 0, 2, 0, 0], [0, 2, 2, 1, 0]]  # what any NumPy draws


def test_draws_are_whole_and_come_in_pieces() -> None:
    rows = 3000
    parts = list(resamples(rows))
    assert len(parts) > 1
    assert sum(map(len, parts)) == RESAMPLES
    for part in parts:
        assert part.nbytes <= 16 << 20
        assert (part.sum(axis=1) == rows).all()
    counts = np.concatenate(parts).mean(axis=0)
    assert abs(counts - 1).max() < 6 / math.sqrt(RESAMPLES)


def test_macro_f1_of_a_draw_is_that_of_its_rows() -> None:
    generator = np.random.default_rng(5)
    there = generator.integers(0, 7, ROWS)
    given = np.where(generator.random(ROWS) < 0.6, there, generator.integers(0, 7, ROWS))
    there[::10] = -1  # rows that nobody measured
    [weights] = resamples(ROWS, count=4)
    found = MacroF1(there, given).values(weights)
    for weight, value in zip(weights.astype(int), found, strict=True):
        chosen = np.repeat(np.flatnonzero(there >= 0), weight[there >= 0])
        mine, theirs = there[chosen], given[chosen]
        right, gave, had = (np.bincount(labels, minlength=7) for labels in (mine[mine == theirs], theirs, mine))
        assert value == pytest.approx(macro_f1(right.tolist(), gave.tolist(), had.tolist()), abs=1e-12)


def test_perplexity_is_e_to_the_loss_of_the_same_draw() -> None:
    [weights] = resamples(ROWS, count=3)
    ratio = losses(6, 0.0)[0]
    assert np.allclose(Ratio(ratio.above, ratio.below, True).values(weights), np.exp(ratio.values(weights)))


def test_higher_is_better_where_it_is_and_rows_that_nobody_read_do_not_count() -> None:
    ones, asked = np.ones(60), np.arange(60) < 40
    candidate = Ratio(asked * 0.9, ones * asked)
    champion = Ratio(asked * 0.6, ones * asked)
    found = gain(candidate, champion, lower=False, confidence=0.95)
    assert (found.rows, found.low, found.high) == (40, pytest.approx(0.5), pytest.approx(0.5))
    assert gain(champion, candidate, lower=False, confidence=0.95).high == pytest.approx(-1 / 3)


@pytest.mark.parametrize("rows", [0, 1, LEAST_ROWS - 1])
def test_few_rows_have_no_interval(rows: int) -> None:
    found = gain(*losses(7, 0.5, rows=rows), lower=True, confidence=0.95)
    assert (found.rows, found.low, found.high) == (rows, None, None)
    assert gain(*losses(7, 0.5, rows=LEAST_ROWS), lower=True, confidence=0.95).low is not None


def test_a_gain_over_nothing_is_finite_and_sure() -> None:
    right, nothing, ones = np.array([1.0, 0.0] * 30), np.zeros(60), np.ones(60)
    found = gain(Ratio(right, ones), Ratio(nothing, ones), lower=False, confidence=0.95)
    assert found.low is not None
    assert 1e6 < found.low < found.value < 1e12
    same: Figure = Ratio(nothing, ones)
    assert gain(same, same, lower=False, confidence=0.95).low == 0.0
