"""Intake hands drops out round-robin over families, on a real ledger; runs that have ended make room for the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dropforge_airflow.tasks.announce import Line
from dropforge_airflow.tasks.intake import take_in

from dropforge import in_flight, layout, ledger
from dropforge.drop import parse_partition_key
from dropforge.fair_share import RunSlots
from dropforge.families import rules_of
from dropforge.store import Store

from .test_intake import age, arrive, upload

SLOTS = RunSlots(16, 8)


@dataclass
class Airflow:
    """The fine-tune DAG: each event becomes a run that claims its drop at once, and ends when the test says so."""

    store: Store
    families: Path
    slots: RunSlots = SLOTS
    others: int = 0  # runs that people started
    active: set[str] = field(default_factory=set)  # runs of drops, as FAMILY/DROP

    def line(self) -> Line:
        return Line(active=len(self.active) + self.others, going=self.going)

    def going(self, runs: Sequence[str]) -> frozenset[str]:
        return frozenset(self.active & set(runs))

    def look(self) -> list[str]:
        """What intake sends."""
        keys = take_in(
            self.store, "b", "alias", self.line, rules=lambda name: rules_of(self.families, name), slots=self.slots
        ).keys
        return [f"{named['family']}/{named['id']}" for named in map(parse_partition_key, keys)]

    def run(self, sent: Sequence[str]) -> None:
        for one in sent:
            family, _, drop_id = one.partition("/")
            assert ledger.claim(self.store, family, drop_id, one) is not None
        self.active |= set(sent)

    def end(self, one: str, *, torn_down: bool = True) -> None:
        self.active.remove(one)
        family, _, drop_id = one.partition("/")
        if torn_down:
            in_flight.leave_by_event(self.store, f"alias/{family}/name/{drop_id}")


@pytest.fixture
def airflow(store: Store, tmp_path: Path) -> Airflow:
    return Airflow(store, tmp_path / "families")


def drop(store: Store, family: str, number: int) -> None:
    for index in range(number):
        name = f"d{len(ledger.arrived(store, family)) + index}"
        arrive(store, upload(store, family, name, f'{{"text": "{name}"}}'))


def by_family(sent: Sequence[str]) -> Counter[str]:
    return Counter(one.partition("/")[0] for one in sent)


def held(store: Store, family: str) -> set[str | None]:
    return {ledger.held(store, family, drop_id) for name, drop_id in ledger.pending(store) if name == family}


def test_thirty_drops_of_one_family_leave_room_for_two_others(store: Store, airflow: Airflow) -> None:
    drop(store, "many", 30)
    first = airflow.look()
    assert by_family(first) == {"many": 8}
    airflow.run(first)
    assert held(store, "many") == {
        "its family has as many runs as it may at once (DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY: 8); the next begins when "
        "one ends"
    }
    drop(store, "one", 3)
    drop(store, "two", 9)
    others = airflow.look()
    assert by_family(others) == {"one": 3, "two": 5}
    airflow.run(others)
    assert airflow.look() == []
    (waits,) = held(store, "two")
    assert str(waits).startswith("all 16 runs that Airflow has at once are taken")
    # A place that becomes free goes to who has the fewest, and only when it is free.
    airflow.end(first[0])
    freed = airflow.look()
    assert by_family(freed) == {"two": 1}
    airflow.run(freed)
    ended = 1
    while airflow.active:
        airflow.end(min(airflow.active))
        ended += 1
        airflow.run(airflow.look())
        assert len(airflow.active) <= 16
        assert max(by_family(sorted(airflow.active)).values(), default=0) <= 8
    assert ended == 42
    assert list(ledger.pending(store)) == []
    assert in_flight.entries(store) == ()


def test_a_run_that_ended_without_its_teardown_makes_room_at_the_next_look(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(16, 1)
    drop(store, "fam", 2)
    (first,) = airflow.look()
    airflow.run([first])
    assert airflow.look() == []
    airflow.end(first, torn_down=False)
    (second,) = airflow.look()
    assert second != first
    assert [f"{family}/{drop_id}" for family, drop_id in in_flight.entries(store)] == [second]


def test_an_event_that_was_lost_keeps_its_place_and_takes_no_second_one(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(2, 1)
    drop(store, "fam", 2)
    drop(store, "other", 2)
    sent = airflow.look()
    assert by_family(sent) == {"fam": 1, "other": 1}
    assert airflow.look() == []  # too early, and no slot is free for the others
    ages(store, sent)
    assert sorted(airflow.look()) == sorted(sent)


def ages(store: Store, sent: Sequence[str]) -> None:
    """The events were sent long ago, and nothing came of them."""
    markers = {one: layout.pending_key(*one.split("/")) for one in sent}
    others = {info.key: store.get(info.key) for info in store.list(layout.PENDING) if info.key not in markers.values()}
    for key in others:
        store.delete(key)
    age(store, 1000)
    for key, body in others.items():
        store.put(key, body)


def test_runs_of_people_take_slots_and_nothing_of_a_family_s_limit(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(4, 2)
    airflow.others = 3
    drop(store, "fam", 3)
    assert len(airflow.look()) == 1
    airflow.others = 0
    # The event that was sent has no run yet: it still takes a slot, and one of the family's two.
    assert len(airflow.look()) == 1


def test_a_family_s_file_says_how_many_and_a_change_holds_at_once(store: Store, airflow: Airflow) -> None:
    airflow.families.mkdir()
    file = airflow.families / "fam.yaml"
    file.write_text("intake: {max_active_runs: 1}\n")
    drop(store, "fam", 12)
    airflow.run(airflow.look())
    assert len(airflow.active) == 1
    assert "(intake.max_active_runs: 1)" in str(held(store, "fam"))
    file.write_text("intake: {max_active_runs: 10}\n")
    assert len(airflow.look()) == 9


def test_an_intake_that_dies_between_its_two_notes_hands_out_no_more_than_there_is(
    store: Store, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow.slots = RunSlots(16, 1)
    drop(store, "fam", 2)
    kept = store.put_if_match

    def dies(key: str, data: bytes, etag: str) -> bool:
        if '"times": 1' in data.decode():
            raise ConnectionError("the task is killed")
        return kept(key, data, etag)

    monkeypatch.setattr(store, "put_if_match", dies)
    with pytest.raises(ConnectionError):
        airflow.look()
    monkeypatch.setattr(store, "put_if_match", kept)
    assert len(in_flight.entries(store)) == 1
    assert len(airflow.look()) == 1
    assert airflow.look() == []


def test_a_drop_that_a_person_s_run_took_meanwhile_counts_until_that_run_ends(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(16, 1)
    drop(store, "fam", 2)
    (sent,) = airflow.look()
    airflow.active.add("manual__1")
    assert ledger.claim(store, *sent.split("/"), "manual__1") is not None
    assert airflow.look() == []
    airflow.active.clear()
    assert len(airflow.look()) == 1


def test_what_is_no_drop_s_event_frees_nothing(store: Store) -> None:
    in_flight.enter(store, "fam", "a" * 64)
    for key in (None, "", "nonsense", "a/b/c/d"):
        in_flight.leave_by_event(store, key)
    assert len(in_flight.entries(store)) == 1
