"""When a nudge is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dropforge_airflow.backlog import Backlog, Nudged, deserves_event

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_nudges_begin_late_and_grow_rarer() -> None:
    backlog = Backlog(after=20, longest=60)
    nudged = [now for now in range(0, 300, 5) if backlog.overdue(["a"], now)]
    assert nudged == [20, 60, 120, 180, 240]


def test_a_new_key_has_its_own_time_and_a_key_that_left_is_forgotten() -> None:
    backlog = Backlog(after=20, longest=60)
    assert backlog.overdue(["a"], 0) == 0
    assert backlog.overdue(["a", "b"], 20) == 1
    assert backlog.overdue(["a", "b"], 40) == 1
    assert backlog.overdue([], 41) == 0
    assert backlog.overdue(["a"], 61) == 0
    assert backlog.overdue(["a"], 81) == 1


def test_events_of_a_waiting_drop() -> None:
    assert deserves_event(Nudged(), NOW)
    for times, pause in [(1, 20), (2, 40), (3, 80), (10, 600), (5000, 600)]:
        assert not deserves_event(Nudged(times, NOW - timedelta(seconds=pause - 1)), NOW)
        assert deserves_event(Nudged(times, NOW - timedelta(seconds=pause)), NOW)
