"""The median stopping rule by examples and by what holds for all of them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dropforge.stopping import behind
from dropforge.sweep import EarlyStop

ONE = EarlyStop(after_trials=1)
GOOD = {0: 7.0, 10: 5.0, 20: 4.0}  # averages 7, 6, 5.33
STUCK = {0: 7.0, 10: 6.9}
SLOW = {0: 7.0, 10: 5.9}


def test_who_is_worse_than_the_averages_is_stopped() -> None:
    found = behind({0: GOOD, 1: STUCK, 2: SLOW}, {1, 2}, ONE, "lower")
    assert list(found) == [1]
    assert found[1] == (
        "its best of 6.9000 up to step 10 is worse than 6.2250, the median of the averages of 2 other trials"
    )


def test_only_those_that_came_as_far_are_compared_with() -> None:
    assert behind({0: {0: 7.0, 5: 1.0}, 1: STUCK}, {1}, ONE, "lower") == {}
    assert behind({0: GOOD, 1: STUCK}, {1}, EarlyStop(), "lower") == {}, "two are needed"
    # Of its newer steps nobody has come as far, but of this one.
    assert list(behind({0: {0: 7.0, 10: 5.0}, 1: {**STUCK, 20: 6.8}}, {1}, ONE, "lower")) == [1]


def test_evaluations_before_the_training_say_nothing() -> None:
    assert behind({0: {0: 1.0, 10: 1.0}, 1: {0: 9.0}}, {1}, ONE, "lower") == {}
    late = EarlyStop(after_trials=1, after_evaluations=2)
    assert behind({0: GOOD, 1: STUCK}, {1}, late, "lower") == {}
    assert list(behind({0: GOOD, 1: {**STUCK, 20: 6.9}}, {1}, late, "lower")) == [1]


def test_higher_may_be_better_and_no_number_is_the_worst() -> None:
    assert list(behind({0: {0: 0.1, 5: 0.9}, 1: {0: 0.1, 5: 0.2}}, {0, 1}, ONE, "higher")) == [1]
    assert list(behind({0: GOOD, 1: {10: math.nan}}, {1}, ONE, "lower")) == [1]
    assert behind({0: {10: math.inf}, 1: {10: math.nan}}, {0, 1}, ONE, "lower") == {}


CURVES = st.dictionaries(
    st.integers(0, 6),
    st.dictionaries(st.integers(0, 5).map(lambda n: 10 * n), st.floats(-5, 5), max_size=6),
    max_size=7,
)


@given(curves=CURVES, after=st.integers(1, 3))
def test_the_best_is_never_stopped(curves: dict[int, dict[int, float]], after: int) -> None:
    rule = EarlyStop(after_trials=after)
    found = behind(curves, set(curves), rule, "lower")
    # Who has the lowest value of all by every step has fallen behind nobody.
    for trial, own in curves.items():
        ahead = all(
            min((value for at, value in own.items() if at <= step), default=math.inf)
            <= min((value for at, value in other.items() if at <= step), default=math.inf)
            for other in curves.values()
            for step in range(0, 60, 10)
        )
        assert not (ahead and trial in found)


@given(curves=CURVES)
def test_mirrored_values_give_the_same_answer(curves: dict[int, dict[int, float]]) -> None:
    mirrored = {trial: {step: -value for step, value in curve.items()} for trial, curve in curves.items()}
    assert set(behind(curves, set(curves), ONE, "lower")) == set(behind(mirrored, set(curves), ONE, "higher"))
