"""Progress in one line: amounts, rate and time left, and no rate where nobody can know it."""

from __future__ import annotations

import pytest

from curation.pace import Pace, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_bytes_rows_rate_and_time_left(clock: Clock) -> None:
    pace = Pace(clock)
    pace("read", 0, 4_000_000_000)
    assert pace.line() == "read: 0.0 of 4.0 GB"
    clock.now = 20.0
    pace("read", 1_000_000_000, 4_000_000_000, 310_000)
    assert pace.line() == "read: 1.0 of 4.0 GB, 310,000 rows, 50.0 MB/s, 1 min 0 s left"


def test_a_new_stage_forgets_the_last_ones_rate(clock: Clock) -> None:
    pace = Pace(clock)
    pace("read", 0, 100)
    clock.now = 10.0
    pace("read", 100, 100, 7)
    assert pace.line() == "read: 100 of 100 B, 7 rows, 10.0 B/s"
    pace("deduplicate", 0, 1)
    assert (pace.line(), pace.rate) == ("deduplicate: 0 of 1", None)


def test_splits_that_an_earlier_try_finished_are_forgotten(clock: Clock) -> None:
    pace = Pace(clock)
    pace("read", 0, 10_000)
    clock.now = 2.0
    pace("read", 5_000, 10_000)  # taken from disk
    for _ in range(20):
        clock.now += 10
        pace("read", pace.done + 100, 10_000)
    assert pace.rate == pytest.approx(10)


def test_no_rate_while_nothing_moves(clock: Clock) -> None:
    pace = Pace(clock)
    pace("fetch", 0, 0)
    clock.now = 5.0
    pace("fetch", 0, 0)
    assert (pace.rate, pace.left, pace.line()) == (None, None, "fetch: 0 of 0 B")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (54, "54 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told
