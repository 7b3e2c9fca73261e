"""What was noted in the future, before the clock was set back: nothing waits until the clock has come to it again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from dropforge_airflow.backlog import Nudged, deserves_event

from dropforge import intake_ledger
from dropforge.intake_ledger import State
from dropforge.intake_rules import Intake, Known, Waiting, decide
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
