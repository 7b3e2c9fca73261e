"""Intake hands drops out round-robin over families, on a real ledger; runs that have ended make room for the next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from dropforge_airflow.run_ended import RUN_ENDED
from dropforge_airflow.tasks.announce import Line
from dropforge_airflow.tasks.intake import take_in

from dropforge import in_flight, intake_ledger, layout, ledger
from dropforge.drop import parse_partition_key
from dropforge.fair_share import RunSlots
from dropforge.families import rules_of
from dropforge.store import Store

from .conftest import Yard
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
        return Line(active=len(self.active) + self.others, going=self.going, slots=self.slots)

    def going(self, runs: Sequence[str]) -> frozenset[str]:
        return frozenset(self.active & set(runs))

    def look(self) -> list[str]:
        """What intake sends."""
        keys = take_in(self.store, "b", "alias", self.line, rules=lambda name: rules_of(self.families, name)).keys
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
            in_flight.run_ended(self.store, f"alias/{family}/name/{drop_id}", one)


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


def two_drops_and_one_slot(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(16, 1)
    drop(store, "fam", 2)


def test_thirty_drops_of_one_family_leave_room_for_two_others(store: Store, airflow: Airflow) -> None:
    drop(store, "many", 30)
    first = airflow.look()
    assert by_family(first) == {"many": 8}
    airflow.run(first)
    assert held(store, "many") == {
        "it waits until a run has ended: there are at most 8 of its family (DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY) and "
        "16 of all (Airflow's max_active_runs_per_dag) at once"
    }
    drop(store, "one", 3)
    drop(store, "two", 9)
    others = airflow.look()
    assert by_family(others) == {"one": 3, "two": 5}
    airflow.run(others)
    assert airflow.look() == []
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
    two_drops_and_one_slot(store, airflow)
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


def test_runs_of_people_take_slots_and_keep_no_family_out(store: Store, airflow: Airflow) -> None:
    airflow.others = 40
    drop(store, "fam", 3)
    drop(store, "other", 2)
    sent = airflow.look()
    assert by_family(sent) == {"fam": 1, "other": 1}  # they stand in Airflow's queue, as the people's do
    airflow.run(sent)
    assert airflow.look() == []
    airflow.others = 13
    assert len(airflow.look()) == 1  # of either: S3 tells uploads of one second from each other by nothing


def test_an_event_that_has_no_run_yet_takes_a_slot(store: Store, airflow: Airflow) -> None:
    airflow.slots = RunSlots(3)
    drop(store, "fam", 5)
    assert len(airflow.look()) == 3
    assert airflow.look() == []


def test_a_marker_without_its_drop_takes_nobody_s_place(store: Store, airflow: Airflow) -> None:
    """An intake was cut off before the entry, and the upload is another one now."""
    airflow.slots = RunSlots(1, 1)
    drop(store, "fam", 2)
    drop(store, "other", 1)
    left = {"drop": "gone", "bucket": "b", "completed": 1.0, "at": "2020-01-01T00:00:00+00:00"}
    for family in ("fam", "lonely"):
        store.put(layout.pending_key(family, "0" * 32), json.dumps(left).encode())
    for _ in range(3):
        airflow.run(airflow.look())
        airflow.end(min(airflow.active))
    assert {drop_id for _, drop_id in ledger.pending(store)} == {"0" * 32}


def test_a_turn_of_the_rate_is_counted_when_its_event_is_sent(store: Store, airflow: Airflow) -> None:
    airflow.families.mkdir()
    (airflow.families / "fam.yaml").write_text("intake: {rate: 1 per day, latest_only: true, max_active_runs: 1}\n")
    drop(store, "fam", 1)
    airflow.run(airflow.look())
    forget_turns(store)  # a day has gone by, and the run goes on
    drop(store, "fam", 1)
    assert airflow.look() == []
    drop(store, "fam", 1)
    assert airflow.look() == []
    airflow.end(min(airflow.active))
    (sent,) = airflow.look()
    newest = max(ledger.arrived(store, "fam"), key=lambda one: (one.completed, one.drop))
    assert sent == f"fam/{newest.id}"
    assert set(intake_ledger.read_state(store, "fam").known.announced) == {newest.id}


def forget_turns(store: Store) -> None:
    store.delete(layout.rules_key("fam"))


def test_another_intake_that_announces_meanwhile_lets_no_family_beyond_its_limit(
    store: Store, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_drops_and_one_slot(store, airflow)
    enough = airflow.line

    def slow() -> Line:
        monkeypatch.setattr(airflow, "line", enough)
        other.extend(airflow.look())
        return enough()

    other: list[str] = []
    monkeypatch.setattr(airflow, "line", slow)
    assert len([*airflow.look(), *other]) == 1
    assert len(in_flight.entries(store)) == 1


def test_a_second_run_of_a_drop_that_ends_frees_nothing_of_the_first(store: Store, airflow: Airflow) -> None:
    two_drops_and_one_slot(store, airflow)
    (first,) = airflow.look()
    airflow.run([first])
    in_flight.run_ended(store, f"alias/{first.replace('/', '/name/')}", "the event was sent twice")
    assert airflow.look() == []
    airflow.end(first)
    assert len(airflow.look()) == 1


def test_a_family_s_file_says_how_many_and_a_change_holds_at_once(store: Store, airflow: Airflow) -> None:
    airflow.families.mkdir()
    file = airflow.families / "fam.yaml"
    file.write_text("intake: {max_active_runs: 1}\n")
    drop(store, "fam", 12)
    airflow.run(airflow.look())
    assert len(airflow.active) == 1
    assert "at most 1 of its family (intake.max_active_runs)" in str(held(store, "fam"))
    file.write_text("intake: {max_active_runs: 10}\n")
    assert len(airflow.look()) == 9


def test_an_intake_that_dies_between_its_two_notes_hands_out_no_more_than_there_is(
    store: Store, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_drops_and_one_slot(store, airflow)
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
    two_drops_and_one_slot(store, airflow)
    (sent,) = airflow.look()
    airflow.active.add("manual__1")
    assert ledger.claim(store, *sent.split("/"), "manual__1") is not None
    assert airflow.look() == []
    airflow.active.clear()
    assert len(airflow.look()) == 1


def test_what_is_no_drop_s_event_frees_nothing(store: Store) -> None:
    in_flight.enter(store, "fam", "a" * 32)
    for key in (None, "", "nonsense", "a/b/c/d", f"b/fam/d/{'a' * 32}"):
        in_flight.run_ended(store, key, "run-1")
    assert len(in_flight.entries(store)) == 1


def test_what_airflow_calls_when_a_run_has_failed_frees_its_place_and_no_other(yard: Yard) -> None:
    drop(yard.store, "fam", 1)
    arrive(yard.store, f"{layout.drop_prefix('fam', 'd0')}_SUCCESS", bucket=yard.bucket)
    (key,) = take_in(yard.store, yard.bucket, "alias", Line).keys
    named = parse_partition_key(key)
    assert ledger.claim(yard.store, named["family"], named["id"], "run-1") is not None
    for run in (SimpleNamespace(partition_key=key, run_id="run-2"), SimpleNamespace(run_id="run-1"), None):
        RUN_ENDED.notify({"dag_run": run})  # type: ignore[typeddict-item]
        assert len(in_flight.entries(yard.store)) == 1
    RUN_ENDED.notify({"dag_run": SimpleNamespace(partition_key=key, run_id="run-1")})  # type: ignore[typeddict-item]
    assert in_flight.entries(yard.store) == ()
