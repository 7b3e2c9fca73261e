"""A family's rules of intake on a real ledger: one run over several drops, a rate, and the newest alone."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from dropforge_airflow.operators import CurateOperator
from dropforge_airflow.tasks import data
from dropforge_airflow.tasks.announce import Line
from dropforge_airflow.tasks.intake import Intake, take_in
from dropforge_airflow.tasks.plan import Plan, make_plan
from dropforge_airflow.tasks.recipe import Installation
from kubeflow_training.exceptions import JobFailedForGood
from kubeflow_training.jobs.observation import Observation
from kubeflow_training.operators import PyTorchJobOperator

from dropforge import intake_ledger, layout, ledger
from dropforge.drop import parse_partition_key
from dropforge.errors import DataError
from dropforge.families import Family, rules_of
from dropforge.run_limits import RunLimits, run_limits
from dropforge.store import FolderStore, Store

from .conftest import Yard
from .test_intake import age, arrive, upload

WINDOW = "intake: {window: 30 minutes}\nrecipe: {extends: tiny, train: {max_steps: 7}}\n"
Asked = Callable[[Store], Intake]


@pytest.fixture
def rules(tmp_path: Path) -> Callable[[str], Asked]:
    """An intake by a file of the family `fam`."""

    def written(text: str) -> Asked:
        (tmp_path / "fam.yaml").write_text(text)
        return lambda store: take_in(store, "b", "alias", Line, rules=partial(rules_of, tmp_path))

    return written


def come(store: Store, *names: str) -> None:
    for name in names:
        arrive(store, upload(store, "fam", name, f'{{"text": "{name}"}}'))


def older(store: Store, minutes: float) -> None:
    """Make the drops that wait look as if they had come earlier."""
    for info in store.list(layout.PENDING):
        note = json.loads(store.get(info.key))
        note["at"] = (datetime.fromisoformat(note["at"]) - timedelta(minutes=minutes)).isoformat()
        note["completed"] -= 60 * minutes
        store.put(info.key, json.dumps(note).encode())


def plan(store: Store, key: str, run: str = "run-1") -> Plan:
    return make_plan(store, "b", {"preset": "sample"}, partition_key=key, owner=run)


def ids(store: Store) -> dict[str, str]:
    return {drop.drop: drop.id for drop in ledger.arrived(store, "fam")}


def test_drops_within_a_window_become_one_run_with_the_family_s_recipe(
    store: Store, rules: Callable[[str], Asked]
) -> None:
    intake = rules(WINDOW)
    come(store, "d1", "d2")
    assert intake(store).keys == []
    assert intake(store).keys == []
    known = ids(store)
    assert "its family gathers drops until" in str(ledger.held(store, "fam", known["d1"]))
    assert intake_ledger.asleep(store, datetime.now(UTC)) == {"fam"}
    assert intake_ledger.asleep(store, datetime.now(UTC) + timedelta(minutes=11)) == frozenset()
    older(store, 30)
    come(store, "d3")
    (key,) = intake(store).keys
    batch = parse_partition_key(key)["id"]
    assert [one for _, one in ledger.pending(store)] == [batch]
    assert ledger.taken_by(store, "fam", known["d1"]) == f"is part of batch {batch}"
    planned = plan(store, key)
    assert sorted(part["drop"] for part in planned["parts"]) == ["d1", "d2", "d3"]
    assert planned["recipe"]["train"]["max_steps"] == 7
    assert [ledger.newest_owner(store, "fam", one) for one in ids(store).values()] == ["run-1"] * 3
    # What comes later opens a window of its own; what came again changes nothing.
    come(store, "d4")
    arrive(store, "drops/fam/d1/_SUCCESS", salt="again")
    assert intake(store).keys == []
    assert [one for _, one in ledger.pending(store)] == [ids(store)["d4"]]


def test_an_upload_that_holds_the_files_of_a_batch_is_not_taken_for_it(
    store: Store, rules: Callable[[str], Asked]
) -> None:
    intake = rules(WINDOW)
    store.put("drops/fam/all/d1/a.jsonl", b'{"text": "d1"}')
    store.put("drops/fam/all/_SUCCESS", b"")
    arrive(store, "drops/fam/all/_SUCCESS")
    intake(store)
    older(store, 31)
    (first,) = intake(store).keys
    plan(store, first)
    come(store, "d1")
    intake(store)
    older(store, 31)
    (key,) = intake(store).keys
    assert [part["drop"] for part in plan(store, key, "run-2")["parts"]] == ["d1"]


def batch(store: Store, intake: Asked, *names: str) -> str:
    """The partition key of a batch of such drops, in this order."""
    for name in names:
        come(store, name)
        intake(store)
    older(store, 31)
    (key,) = intake(store).keys
    return key


def test_a_batch_has_no_more_bytes_than_a_run_may_have(
    tmp_path: Path, rules: Callable[[str], Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, intake = FolderStore(tmp_path / "bucket"), rules(WINDOW)
    come(store, "d1", "d2", "d3")
    intake(store)
    older(store, 31)
    monkeypatch.setenv("DROPFORGE_LIMITS", "bytes=30")  # of 14 each
    keys = intake(store).keys
    within = Installation(limits=run_limits())
    made = [make_plan(store, "b", {}, partition_key=key, owner=key, installation=within)["parts"] for key in keys]
    assert sorted(map(len, made)) == [1, 2]
    assert sorted(part["drop"] for parts in made for part in parts) == ["d1", "d2", "d3"]


def test_a_batch_that_is_over_a_limit_by_now_is_divided_until_each_drop_has_its_own_end(
    tmp_path: Path, rules: Callable[[str], Asked]
) -> None:
    store, intake = FolderStore(tmp_path / "bucket"), rules(WINDOW)
    keys, ends = [batch(store, intake, "d1", "d2", "d300")], []
    within = Installation(limits=RunLimits(bytes=14))
    come(store, "d4")  # waits for its own window meanwhile
    for key in keys:  # which grow
        parts = [part.drop for part in ledger.read(store, "fam", key.split("/")[3]).parts]
        try:
            make_plan(store, "b", {}, partition_key=key, owner=key, installation=within)
            ends.append((parts, "planned"))
        except DataError as error:
            ends.append((parts, error.mend.partition("installation. ")[2]))
        keys += [one for one in intake(store).keys if one not in keys]
    told = "The drops of this batch wait again as two batches, of 1 and {}"
    refused = [(["d1", "d2", "d300"], told.format(2)), (["d2", "d300"], told.format(1)), (["d300"], "")]
    assert sorted(ends) == sorted([*refused, (["d1"], "planned"), (["d2"], "planned")])
    assert [one for _, one in ledger.pending(store)] == [ids(store)["d4"]]


@pytest.mark.parametrize("place", ["worker", "cluster"])
def test_one_bad_drop_takes_no_other_with_it(
    yard: Yard, rules: Callable[[str], Asked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setenv("DROPFORGE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    store, intake = yard.store, rules("intake: {window: 30 minutes}\nrecipe: {extends: tiny}\n")
    for name in ("d1", "d2", "d3"):
        rows = "".join(json.dumps({"text": f"row {number} of drop {name}"}) + "\n" for number in range(40))
        listed = json.dumps([{"key": "a.jsonl", "size": len(rows), "sha256": "0" * 64}])
        arrive(store, upload(store, "fam", name, rows, listed if name == "d2" else ""))
    intake(store)
    key = batch(store, intake)

    def job_failed(*_: Any) -> None:
        said = "file 'd2/a.jsonl' of the drop drops/fam/: it has other bytes"
        seen = Observation.from_dict({"phase": "failed", "reason": "bad data", "message": said})
        raise JobFailedForGood(f"job team/curate failed: {said}", seen)

    # What a job's end becomes is told in the tests of kubeflow_training; here nothing runs.
    monkeypatch.setattr(PyTorchJobOperator, "resume", job_failed)

    def curate(key: str) -> Any:
        planned = plan(store, key, key)
        if place == "cluster":
            CurateOperator(task_id="curate", planned=planned).resume({}, {})
        return data.curate(planned)

    with pytest.raises(AirflowFailException, match=r"d2/a\.jsonl"):
        curate(key)
    place = "worker"
    known = ids(store)
    bad, good = sorted(intake(store).keys, key=lambda one: len(ledger.read(store, "fam", one.split("/")[3]).parts))
    assert curate(good)["rows"]["train"] > 0
    assert {ledger.newest_owner(store, "fam", known[name]) for name in ("d1", "d3")} == {good}
    with pytest.raises(AirflowFailException, match=r"d2/a\.jsonl.*Upload changed data as a new drop$"):
        curate(bad)
    assert (intake(store).keys, list(ledger.pending(store))) == ([], [])


@pytest.mark.parametrize("writes", range(7))
def test_a_task_that_is_cut_off_while_it_divides_a_batch_does_it_whole_when_it_is_done_again(
    tmp_path: Path, rules: Callable[[str], Asked], writes: int
) -> None:
    store = FolderStore(tmp_path / "bucket")
    made = batch(store, rules(WINDOW), "d1", "d2", "d3").split("/")[3]
    ledger.claim(store, "fam", made, "run-1")
    with contextlib.suppress(OSError):
        intake_ledger.separate(Cut(tmp_path / "bucket", writes), "fam", made, "it is bad")
    assert intake_ledger.separate(store, "fam", made, "it is bad") == (1, 2)
    groups = {note["drop"]: note["group"] for note in map(json.loads, map(store.get, store.sizes(layout.PENDING)))}
    assert groups == {"d1": f"{made}-first", "d2": f"{made}-second", "d3": f"{made}-second"}
    assert [ledger.owner_of(store, "fam", one) for one in ids(store).values()] == [None] * 3


class Cut(FolderStore):
    """A bucket whose writer dies after so many writes."""

    def __init__(self, root: Path, left: int) -> None:
        super().__init__(root)
        self.left = left

    def _write(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("killed")

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._write()
        return super().put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        self._write()
        return super().put_if_match(key, data, etag)

    def delete(self, key: str) -> None:
        self._write()
        super().delete(key)


@pytest.mark.parametrize("writes", range(1, 16))
def test_an_intake_that_is_cut_off_while_it_gathers_makes_one_run_in_the_end(
    tmp_path: Path, rules: Callable[[str], Asked], writes: int
) -> None:
    intake = rules(WINDOW + "start: base\n")
    store = FolderStore(tmp_path / "bucket")
    come(store, "d1", "d2", "d3")
    intake(store)
    older(store, 31)
    try:
        keys = intake(Cut(tmp_path / "bucket", writes)).keys
    except OSError:
        keys = []
    if not keys:  # the event of an intake that died is lost with it
        age_if_announced(store)
        keys = intake(store).keys
    (key,) = keys
    assert len(plan(store, key)["parts"]) == 3
    age_if_announced(store)
    assert intake(store).keys == []
    assert list(ledger.pending(store)) == []


def age_if_announced(store: Store) -> None:
    if all("last" in json.loads(store.get(info.key)) for info in store.list(layout.PENDING)):
        age(store, 1000)


def test_a_rate_holds_the_others_and_a_lost_event_takes_no_second_turn(
    store: Store, rules: Callable[[str], Asked]
) -> None:
    intake = rules("intake: {rate: 1 per day}")
    come(store, "d1")
    (key,) = intake(store).keys
    come(store, "d2")
    assert intake(store).keys == []
    assert "1 per day" in str(ledger.held(store, "fam", ids(store)["d2"]))
    # One of two is announced: it must be nudged, so nobody sleeps.
    assert intake_ledger.asleep(store, datetime.now(UTC)) == frozenset()
    for info in store.list(layout.PENDING):
        note = json.loads(store.get(info.key))
        if "last" in note:
            note["last"] = (datetime.fromisoformat(note["last"]) - timedelta(seconds=1000)).isoformat()
            store.put(info.key, json.dumps(note).encode())
    assert intake(store).keys == [key]
    plan(store, key)
    assert intake(store).keys == []
    assert intake_ledger.asleep(store, datetime.now(UTC)) == {"fam"}
    state = json.loads(store.get(layout.rules_key("fam")))
    day = timedelta(days=1)
    state["announced"] = {one: (datetime.fromisoformat(at) - day).isoformat() for one, at in state["announced"].items()}
    store.put(layout.rules_key("fam"), json.dumps(state).encode())
    assert [name.split("/")[2] for name in intake(store).keys] == ["d2"]


def test_only_the_newest_gets_a_run_and_the_others_ends_are_told(store: Store, rules: Callable[[str], Asked]) -> None:
    come(store, "d1", "d2")
    take_in(store, "b", "alias", Line)  # before there were rules: both are announced
    intake = rules("intake: {latest_only: true}")
    older(store, 10)
    come(store, "d3")
    (key,) = intake(store).keys
    known = ids(store)
    assert [one for _, one in ledger.pending(store)] == [known["d3"]]
    told = {one.drop: one.reason for one in intake_ledger.superseded(store)}
    assert told == dict.fromkeys(
        ("d1", "d2"), f"superseded by drop d3 (id {known['d3']}), which is newer (intake.latest_only)"
    )
    # The run that was on its way finds it, and a person may still insist.
    with pytest.raises(AirflowSkipException, match="Drop fam/d1 gets no run: superseded by drop d3"):
        plan(store, f"alias/fam/d1/{known['d1']}", "run-0")
    again = make_plan(store, "b", {"drop": "fam/d1", "again": True, "preset": "tiny"}, partition_key=None, owner="me")
    assert again["counter"] == 2
    assert ledger.newest_owner(store, "fam", known["d1"]) == "me"
    plan(store, key)
    assert intake(store).keys == []
    # Sent again it waits as the newest.
    (letter,) = [one for one in intake_ledger.superseded(store) if one.drop == "d2"]
    intake_ledger.revive(store, letter)
    assert [name.split("/")[2] for name in intake(store).keys] == ["d2"]
    assert [one.drop for one in intake_ledger.superseded(store)] == ["d1"]


def test_a_run_that_is_faster_keeps_its_drop(store: Store, rules: Callable[[str], Asked]) -> None:
    come(store, "d1")
    intake = rules("intake: {latest_only: true}")
    intake(store)
    one = ids(store)["d1"]
    assert ledger.claim(store, "fam", one, "run-1") is not None
    assert not intake_ledger.supersede(store, "fam", one, "d1", "too late")
    assert list(intake_ledger.superseded(store)) == []
    assert ledger.newest_owner(store, "fam", one) == "run-1"


@pytest.mark.parametrize("torn", [b"", b"{", b"\0" * 60, b"[]"], ids=["empty", "cut", "zeros", "list"])
def test_drops_whose_markers_are_torn_are_those_of_their_entries(
    store: Store, rules: Callable[[str], Asked], torn: bytes
) -> None:
    intake = rules(WINDOW)
    come(store, "d1", "d2", "d3")
    intake(store)
    known = ids(store)
    for name in ("d1", "d2"):
        store.put(layout.pending_key("fam", known[name]), torn)
    assert intake(store).keys == []  # they are as old as their markers
    age_markers(store, torn)
    (key,) = intake(store).keys
    batch = parse_partition_key(key)["id"]
    store.put(layout.pending_key("fam", batch), torn)  # and the batch stays one
    come(store, "d4")
    assert intake(store).keys == [key]
    assert sorted(part["drop"] for part in plan(store, key)["parts"]) == ["d1", "d2", "d3"]
    assert list(intake_ledger.superseded(store)) == []

    latest = rules("intake: {latest_only: true}")
    come(store, "d5")
    latest(store)
    come(store, "d6")
    entered = [info.key for info in store.list(layout.PENDING)]
    assert entered
    for info in store.list(layout.PENDING):
        store.put(info.key, torn)
    assert [key.split("/")[2] for key in latest(store).keys] == ["d6"]
    assert {one.drop for one in intake_ledger.superseded(store)} == {"d4", "d5"}


def age_markers(store: Store, torn: bytes) -> None:
    """As `older`, also for markers that say nothing."""
    for info in store.list(layout.PENDING):
        if store.get(info.key) == torn:
            assert isinstance(store, FolderStore)
            os.utime(store.root / info.key, (info.modified - 31 * 60,) * 2)
        else:
            note = json.loads(store.get(info.key))
            note["at"] = (datetime.fromisoformat(note["at"]) - timedelta(minutes=31)).isoformat()
            store.put(info.key, json.dumps(note).encode())


@pytest.mark.parametrize("text", [WINDOW, "intake: {latest_only: true, rate: 1 per hour}"])
def test_an_upload_that_is_put_right_with_the_bytes_of_before_gets_its_run(
    store: Store, rules: Callable[[str], Asked], text: str
) -> None:
    intake = rules(text)
    ends: list[str] = []
    for number, body in enumerate(("first", "right", "wrong", "right")):
        time.sleep(1.1)  # times of S3 and of files have whole seconds
        name = "other" if number == 0 else "daily"
        arrive(store, upload(store, "fam", name, f'{{"text": "{body}"}}'), salt=str(number))
        ends += intake(store).keys
    older(store, 61)
    state = layout.rules_key("fam")
    if store.stat(state) is not None:
        store.delete(state)
    right = next(drop for drop in ledger.arrived(store, "fam") if drop.drop == "daily")
    assert store.get("drops/fam/daily/a.jsonl") == b'{"text": "right"}'
    ends += intake(store).keys
    parts = {part.id for key in ends for part in ledger.read(store, "fam", parse_partition_key(key)["id"]).parts}
    assert right.id in parts | {parse_partition_key(key)["id"] for key in ends}
    assert right.id not in {one.id for one in intake_ledger.superseded(store)}
    assert next(one.id for one in intake_ledger.superseded(store) if one.drop == "daily") != right.id


@pytest.mark.parametrize("fault", ["name", "entry"])
def test_a_drop_that_cannot_be_in_a_batch_holds_no_other(
    store: Store, rules: Callable[[str], Asked], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    intake = rules(WINDOW)
    come(store, "d1", "d2", "d3", "d4", "d5")
    intake(store)
    known = ids(store)
    bad = layout.ledger_key("fam", known["d2"])
    if fault == "entry":
        store.put(bad, b"{")
    else:  # as one whose marker had another name once
        store.put(bad, store.get(bad).replace(b'"d2"', b'"d4"'))
    older(store, 31)
    keys = intake(store).keys
    planned = [plan(store, key, f"run-{number}") for number, key in enumerate(keys)]
    taken = sorted(part["drop"] for one in planned for part in one["parts"])
    assert taken == (["d1", "d3", "d4", "d5"] if fault == "entry" else ["d1", "d3", "d4", "d4", "d5"])
    assert "Drops of family fam cannot become one run" in caplog.text
    assert [one for _, one in ledger.pending(store)] == ([known["d2"]] if fault == "entry" else [])


def test_a_broken_file_holds_its_family_s_drops_and_no_other(
    store: Store, rules: Callable[[str], Asked], caplog: pytest.LogCaptureFixture
) -> None:
    intake = rules("intake: {rate: often}")
    come(store, "d1")
    arrive(store, upload(store, "other", "o1", '{"text": "o"}'))
    assert [key.split("/")[1] for key in intake(store).keys] == ["other"]
    assert "Drops of family fam wait until its file is fixed. family file 'fam.yaml', key `intake.rate`" in caplog.text
    assert [key.split("/")[1] for key in rules("intake: {rate: 9 per day}")(store).keys] == ["fam"]


def test_a_file_that_fails_as_nobody_foresaw_holds_its_family_s_drops_and_no_other(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fam.yaml").write_text(f"recipe: {{extends: 0x{'f' * 5000}}}")

    def look(family: str) -> Family | None:
        if family == "odd":
            raise ZeroDivisionError("nobody thought of it")
        return rules_of(tmp_path, family)

    for family in ("fam", "odd", "other"):
        arrive(store, upload(store, family, "d1", f'{{"text": "{family}"}}'))
    assert [key.split("/")[1] for key in take_in(store, "b", "alias", Line, rules=look).keys] == ["other"]
    assert "Drops of family fam wait until its file is fixed. family file 'fam.yaml'" in caplog.text
    assert "Drops of family odd wait until its file is fixed. nobody thought of it" in caplog.text


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"announced": 7}', b'{"announced": {"x": "y"}, "newest": 3}'])
def test_what_is_remembered_may_be_lost_and_no_drop_is(
    store: Store, rules: Callable[[str], Asked], text: bytes
) -> None:
    store.put(layout.rules_key("fam"), text)
    come(store, "d1")
    assert len(rules("intake: {rate: 1 per day, latest_only: true}")(store).keys) == 1
    assert list(json.loads(store.get(layout.rules_key("fam")))["announced"]) == [ids(store)["d1"]]
