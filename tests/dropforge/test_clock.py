"""What was noted in the future, before the clock was set back: nothing waits until the clock has come to it again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from dropforge_airflow.backlog import Nudged, deserves_event
from hypothesis import given
from hypothesis import strategies as st

from dropforge import intake_ledger
from dropforge.fair_share import FamilyLoad, RunSlots, share
from dropforge.intake_ledger import State
from dropforge.intake_rules import Intake, Known, Waiting, decide, remember
from dropforge.store import FolderStore
from dropforge.watching.runs import Runs

NOW = datetime(2026, 11, 28, tzinfo=UTC)
LATER = [NOW + timedelta(hours=1), NOW + timedelta(days=1)]


@pytest.mark.parametrize("later", LATER)
def test_the_event_of_a_drop_is_sent_again(later: datetime) -> None:
    assert deserves_event(Nudged(1, later), NOW)


@pytest.mark.parametrize("later", LATER)
def test_rules_of_intake_hold_no_drop_longer_than_they_say(later: datetime) -> None:
    drop = Waiting("1", "a", later)
    assert decide(Intake(window="30 minutes"), [drop], Known(), NOW).batches == (("1",),)
    assert decide(Intake(rate="1 per day"), [drop], Known({"0": later}), NOW).go == ("1",)
    # Clocks of two machines are never quite the same.
    soon = NOW + timedelta(seconds=2)
    assert decide(Intake(window="30 minutes"), [Waiting("1", "a", soon)], Known(), NOW).held
    assert decide(Intake(rate="1 per day"), [drop], Known({"0": soon}), NOW).held


def uploaded(name: str, at: datetime, entered: datetime | None = None, place: str = "b") -> Waiting:
    return Waiting(name, name, entered or at, at.timestamp(), place)


@pytest.mark.parametrize("later", LATER)
def test_a_drop_that_came_with_the_wrong_clock_is_older_than_those_that_came_since(later: datetime) -> None:
    ahead, rules = uploaded("ahead", later), Intake(latest_only=True)
    known = remember(rules, [ahead], Known(), decide(rules, [ahead], Known(), later).go, later)
    since = uploaded("since", NOW)
    for waiting in ([since], [ahead, since]):
        assert decide(rules, waiting, known, NOW).go == ("since",)
    known = remember(rules, [ahead, since], known, ("since",), NOW)
    # And it stays so once the calendar has come to what was noted.
    assert list(decide(rules, [ahead], known, NOW).passed) == ["ahead"]
    assert decide(rules, [uploaded("next", later)], known, later).go == ("next",)
    again = [replace(ahead, drop="same"), replace(since, drop="same")]
    assert list(decide(Intake(window="1 minute"), again, Known(), NOW).passed) == ["ahead"]
    # Nor does it wait behind all that come.
    assert decide(Intake(rate="1 per day"), [since, ahead], Known(), NOW).go == ("ahead",)
    assert share({"f": FamilyLoad([since, ahead], limit=1)}, RunSlots(), 0, NOW).go == (("f", "ahead"),)


@pytest.mark.parametrize(("ahead", "next"), [(60, 57), (24 * 60, 24 * 60 - 1), (4, 1)])
def test_a_drop_just_before_the_false_time_is_passed_over_by_nothing(ahead: int, next: int) -> None:
    rules, later = Intake(latest_only=True), NOW + timedelta(minutes=ahead)
    known = remember(rules, [uploaded("ahead", later)], Known(), ("ahead",), later)
    now = NOW + timedelta(minutes=next)
    drop = uploaded("next", now)
    assert decide(rules, [drop], known, now).go == ("next",)
    assert remember(rules, [drop], known, ("next",), now).newest == drop


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True), st.sampled_from([-86400, -3600, 0, 3600]))
def test_the_newest_is_the_bucket_s_however_wrong_our_own_clock_is(minutes: list[int], off: int) -> None:
    rules, known, ours = Intake(latest_only=True), Known(), timedelta(seconds=off)
    for minute in sorted(minutes):
        at = NOW + timedelta(minutes=minute)
        drop = uploaded(str(minute), at, at + ours)
        assert decide(rules, [drop], known, at + ours).go == (drop.id,)
        known = remember(rules, [drop], known, [drop.id], at + ours)


def test_a_family_sleeps_no_longer_than_it_may(tmp_path) -> None:
    store = FolderStore(tmp_path)
    state = intake_ledger.read_state(store, "f")
    assert intake_ledger.write_state(store, "f", state, State(Known(), NOW + timedelta(minutes=9)))
    assert intake_ledger.asleep(store, NOW) == {"f"}
    assert intake_ledger.asleep(store, NOW - timedelta(hours=1)) == set()


def test_runs_that_ended_before_the_step_are_read_anew(monkeypatch) -> None:
    now, asked = [1e9], []
    runs = Runs(None, lambda: now[0])
    monkeypatch.setattr(runs, "_experiments", lambda: iter(["1"]))
    monkeypatch.setattr(runs, "_search", lambda _, condition: asked.append(condition) or iter(()))
    runs.read()
    now[0] -= 3600
    runs.read()
    assert asked == [asked[0]] * 2
