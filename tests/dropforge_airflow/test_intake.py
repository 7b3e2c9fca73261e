"""From the inbox to partition events, on a real ledger; whatever is repeated changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Set
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.tasks import data
from dropforge_airflow.tasks.announce import Line
from dropforge_airflow.tasks.intake import FinishedDrop, Intake, in_turn, run_intake, take_in

from dropforge import in_flight, inbox, layout, ledger
from dropforge.drop import read_drop
from dropforge.errors import DropforgeError
from dropforge.families import Family
from dropforge.layout import DropName
from dropforge.recipes import load_recipe
from dropforge.retraining import Arrival, There, Trained, choose
from dropforge.store import FolderStore, S3Store, Store

from .conftest import Yard


def arrive(store: Store, *keys: str, bucket: str = "b", salt: str = "") -> None:
    """What the trigger leaves in the inbox when a message came."""
    records = [
        {
            "eventSource": "aws:s3",
            "eventName": "ObjectCreated:Put",
            "eventTime": salt,
            "s3": {"bucket": {"name": bucket}, "object": {"key": key}},
        }
        for key in keys
    ]
    body = json.dumps({"Records": records})
    store.put(layout.inbox_key(inbox.digest(body)), json.dumps({"body": body}).encode())


def upload(store: Store, family: str, drop: str, text: str = '{"text": "a"}', success: str = "") -> str:
    prefix = layout.drop_prefix(family, drop)
    store.put(prefix + "a.jsonl", text.encode())
    store.put(prefix + "_SUCCESS", success.encode())
    return prefix + "_SUCCESS"


def intake(store: Store, line: Line | None = None) -> Intake:
    return take_in(store, "b", "alias", lambda: line or Line())


def age(store: Store, seconds: float) -> None:
    """Make every waiting drop look as if it was announced longer ago."""
    for info in store.list(layout.PENDING):
        note = json.loads(store.get(info.key))
        note["last"] = (datetime.fromisoformat(note["last"]) - timedelta(seconds=seconds)).isoformat()
        store.put(info.key, json.dumps(note).encode())


def test_a_complete_drop_becomes_one_event(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"))
    done = intake(store)
    drop = done.entered[0]
    assert done.keys == [f"alias/fam/d1/{drop.id}"]
    assert ledger.read(store, "fam", drop.id) == drop
    assert list(ledger.pending(store)) == [("fam", drop.id)]
    assert list(store.list(layout.INBOX)) == []


def test_repeats_and_another_order_change_nothing(store: Store) -> None:
    keys = [upload(store, "fam", f"d{number}", f'{{"text": "{number}"}}') for number in range(3)]
    arrive(store, keys[2], keys[0], keys[2])
    first = intake(store)
    arrive(store, keys[0], salt="again")
    arrive(store, *reversed(keys))
    second = intake(store)
    assert sorted(key.split("/")[2] for key in first.keys + second.keys) == ["d0", "d1", "d2"]
    assert sorted(drop.drop for drop in second.known) == ["d0", "d2"]  # each once, though two messages tell of d0


def test_a_drop_is_later_than_one_that_came_with_a_clock_a_day_ahead(tmp_path: Path) -> None:
    store, ids, tomorrow = FolderStore(tmp_path), [], time.time() + 86400
    for name in ("sunday", "monday", "tuesday", "wednesday"):
        success = upload(store, "fam", name, f'{{"text": "{name}"}}')
        if name == "monday":
            os.utime(tmp_path / success, (tomorrow, tomorrow))
        arrive(store, success)
        [drop] = intake(store).entered
        ids.append(drop.id)
        if name == "monday":
            os.utime(tmp_path / layout.ledger_key("fam", drop.id), (tomorrow, tomorrow))
    arrived = [Arrival(drop.drop, drop.id) for drop in ledger.arrived(store, "fam")]
    assert [one.id for one in arrived] == ids
    family = Family(cron="0 3 * * *", data="since-champion", recipe={"extends": "tiny"})
    for known in (ids[:2], ids[1:2]):
        taken = choose(family, There(arrived, Trained("1", frozenset(known), {}), {}, {}))
        assert [one.drop for one in taken] == ["tuesday", "wednesday"]


@pytest.mark.parametrize("claim", [b"", b'{"owner": "ru', b"null", b"[]", b"itself"])
def test_a_claim_that_cannot_be_read_holds_up_no_other_family(store: Store, claim: bytes) -> None:
    arrive(store, upload(store, "bad", "d1"))
    (key,) = intake(store).keys
    drop = key.split("/")[3]
    ledger.claim(store, "bad", drop, "run-1")
    itself = json.dumps({"owner": "x", "counter": 1, "batch": drop}).encode()
    store.put(layout.claim_key("bad", drop, 1), itself if claim == b"itself" else claim)
    for number in range(2):
        arrive(store, upload(store, f"good{number}", "d1", f'{{"text": "{number}"}}'))
        assert [name.split("/")[1] for name in intake(store).keys] == [f"good{number}"]
    assert ("bad", drop) in in_flight.entries(store)


def test_the_same_bytes_under_another_name_are_the_same_drop(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"), upload(store, "fam", "d2"))
    done = intake(store)
    assert len(done.entered) == len(done.known) == len(done.keys) == 1


def test_a_half_uploaded_drop_is_refused_with_its_reason_and_goes_through_when_it_is_complete(store: Store) -> None:
    listed = json.dumps([{"key": "a.jsonl", "size": 13}, {"key": "b.jsonl", "size": 13}])
    key = upload(store, "fam", "d1", success=listed)
    arrive(store, key)
    done = intake(store)
    assert done.keys == []
    record = json.loads(store.get(layout.refused_key("fam", "d1")))
    assert "b.jsonl" in record["cause"]
    assert "Upload what is missing" in record["mend"]
    assert list(store.list(layout.INBOX)) == []

    store.put("drops/fam/d1/b.jsonl", b'{"text": "b"}')
    arrive(store, key, salt="again")
    assert len(intake(store).keys) == 1
    assert store.stat(layout.refused_key("fam", "d1")) is None


def late(store: Store, minutes: float, *, patience: float = 60) -> Intake:
    """An intake of a message that came so many minutes ago."""
    for info in store.list(layout.INBOX):
        entry = json.loads(store.get(info.key))
        entry["at"] = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
        store.put(info.key, json.dumps(entry).encode())
    return take_in(store, "b", "alias", Line, timedelta(minutes=patience))


def test_a_drop_waits_for_the_files_that_it_lists_and_others_go_on_meanwhile(store: Store) -> None:
    listed = json.dumps([{"key": f"{name}.jsonl", "size": 13} for name in "abc"])
    arrive(store, upload(store, "fam", "d1", success=listed), upload(store, "fam", "d2", '{"text": "2"}'))
    done = late(store, 30)
    assert [drop.drop for drop in done.entered] == ["d2"]
    assert "2 files that are not there: 'b.jsonl', 'c.jsonl'" in done.waiting["fam", "d1"]
    assert done.refused == {}
    assert len(list(store.list(layout.INBOX))) == 1  # what stays wakes intake again
    for name in "bc":
        store.put(f"drops/fam/d1/{name}.jsonl", b'{"text": "b"}')
    done = late(store, 59)
    assert [drop.drop for drop in done.entered] == ["d1"]
    assert list(store.list(layout.INBOX)) == []


def test_a_drop_that_waited_too_long_for_its_files_is_refused_with_what_is_missing(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1", success=json.dumps([{"key": "late.jsonl", "size": 13}])))
    assert late(store, 61).waiting == {}
    assert "late.jsonl" in json.loads(store.get(layout.refused_key("fam", "d1")))["cause"]
    assert list(store.list(layout.INBOX)) == []


def test_a_listed_file_of_another_size_is_not_waited_for(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1", success=json.dumps([{"key": "a.jsonl", "size": 99}])))
    assert list(late(store, 0).refused) == [("fam", "d1")]


@pytest.mark.parametrize("success", ["no json", '{"a": 1}', '[{"key": "a.jsonl"}]', '[{"key": "../x", "size": 1}]'])
def test_a_broken_success_object_is_refused(store: Store, success: str) -> None:
    arrive(store, upload(store, "fam", "d1", success=success))
    assert list(intake(store).refused) == [("fam", "d1")]


def test_one_bad_drop_does_not_hold_up_the_others(store: Store) -> None:
    arrive(store, upload(store, "fam", "bad", success="{"), upload(store, "fam", "d1"))
    done = intake(store)
    assert list(done.refused) == [("fam", "bad")]
    assert len(done.keys) == 1


def test_a_drop_that_is_not_there_makes_no_letter_and_no_alert_and_leaves_the_one_it_has(store: Store) -> None:
    """Whoever may send messages could make thousands."""
    told: list[DropName] = []

    def take() -> Intake:
        return take_in(store, "b", "alias", Line, on_refusal=lambda name, *_: told.append(name))

    arrive(store, upload(store, "fam", "bad", success="{"))
    take()
    letter = store.get(layout.refused_key("fam", "bad"))
    store.delete("drops/fam/bad/_SUCCESS")
    store.put("drops/fam/half/a.jsonl", b"{}")
    arrive(store, *(f"drops/fam/{name}/_SUCCESS" for name in ("none", "half", "bad")), upload(store, "fam", "d1"))
    done = take()
    assert (done.refused, sorted(name.drop for name in done.gone), len(done.keys)) == ({}, ["bad", "half", "none"], 1)
    assert (list(store.list(layout.INBOX)), told) == ([], [("fam", "bad")])
    assert store.sizes(layout.REFUSED) == {layout.refused_key("fam", "bad"): len(letter)}


def test_an_unreadable_inbox_entry_is_removed_and_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put(layout.inbox_key("x"), b"no json")
    assert intake(store).keys == []
    assert "cannot be read" in caplog.text
    assert list(store.list(layout.INBOX)) == []


def test_a_crash_after_the_ledger_and_before_the_event_loses_nothing(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"))
    assert len(intake(store).keys) == 1  # this run dies before Airflow stores its event
    assert intake(store).keys == []
    age(store, 21)
    assert len(intake(store).keys) == 1


def test_an_unclaimed_drop_is_announced_again_ever_more_rarely(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"))
    assert len(intake(store).keys) == 1
    for pause in (20, 40, 80):
        age(store, pause - 2)
        assert intake(store).keys == []
        age(store, 2)
        assert len(intake(store).keys) == 1


def test_a_drop_whose_run_stands_in_line_is_not_announced_again(store: Store) -> None:
    for number in range(3):
        arrive(store, upload(store, "fam", f"d{number}", f'{{"text": "{number}"}}'))
    assert len(intake(store).keys) == 3
    age(store, 1000)
    assert intake(store, Line(unclaimed=3)).keys == []
    arrive(store, upload(store, "fam", "new", '{"text": "new"}'))
    assert [key.split("/")[2] for key in intake(store, Line(unclaimed=3)).keys] == ["new"]
    age(store, 1000)
    assert len(intake(store, Line(unclaimed=2)).keys) == 4  # at least one event was lost, no telling which


class Airflow:
    """What a task may ask Airflow: a fine-tune DAG with so many queued runs, and the states of the others' `plan`.

    :param going: those of its runs that have not ended.
    """

    is_paused = False

    def __init__(self, queued: int, *plans: str, going: Set[str] = frozenset()) -> None:
        self.queued, self.plans, self.going = queued, plans, going

    def get_dag(self, dag_id: str) -> Airflow:
        assert dag_id == FINETUNE_DAG
        return self

    def get_dr_count(self, dag_id: str, *, states: list[str], run_ids: list[str] | None = None) -> int:
        assert dag_id == FINETUNE_DAG
        if run_ids is not None:
            assert set(states) == {"queued", "running"}
            return len(self.going & set(run_ids))
        return self.queued if states == ["queued"] else self.queued + len(self.plans)

    def get_ti_count(self, dag_id: str, *, task_ids: list[str], states: list[str]) -> int:
        assert (dag_id, task_ids) == (FINETUNE_DAG, ["plan"])
        assert set(states) <= {state.value for state in TaskInstanceState}
        return sum(state in states for state in self.plans)


def test_runs_that_have_begun_and_not_claimed_yet_stand_in_line_too(yard: Yard, tmp_path: Path) -> None:
    for number in range(3):
        arrive(yard.store, upload(yard.store, "fam", f"d{number}", f'{{"text": "{number}"}}'), bucket=yard.bucket)

    def keys(*line: Any) -> int:
        return len(run_intake(Airflow(*line), FINETUNE_DAG, tmp_path).keys)

    assert keys(0) == 3
    age(yard.store, 1000)
    assert keys(1, "running", "scheduled", "success", "failed") == 0
    assert keys(0, "up_for_retry", "queued", "running") == 0
    assert keys(1, "running", "success", "failed", "skipped") == 3  # one run is missing: nothing may be lost


def test_a_family_has_half_of_airflow_s_runs_unless_the_environment_says_otherwise(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        arrive(yard.store, upload(yard.store, "fam", f"d{number}", f'{{"text": "{number}"}}'), bucket=yard.bucket)
    assert len(run_intake(Airflow(0), FINETUNE_DAG, tmp_path).keys) == 8
    for number, (family, drop_id) in enumerate(in_flight.entries(yard.store)):
        ledger.claim(yard.store, family, drop_id, f"run-{number}")
    runs = [f"run-{number}" for number in range(8)]
    assert run_intake(Airflow(0, *["success"] * 8, going=set(runs)), FINETUNE_DAG, tmp_path).keys == []
    assert len(run_intake(Airflow(0, *["success"] * 5, going=set(runs[:5])), FINETUNE_DAG, tmp_path).keys) == 3
    monkeypatch.setenv("DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY", "many")
    with pytest.raises(DropforgeError, match="DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY"):
        run_intake(Airflow(0), FINETUNE_DAG, tmp_path)


def test_a_paused_dag_gets_no_event_and_nothing_is_forgotten(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"))
    assert intake(store, Line(paused=True)).keys == []
    assert intake(store, Line(paused=True)).keys == []
    assert len(intake(store).keys) == 1


def test_a_claimed_drop_is_announced_no_more(store: Store) -> None:
    arrive(store, upload(store, "fam", "d1"))
    drop = intake(store).entered[0]
    ledger.claim(store, "fam", drop.id, "run-1")
    age(store, 1000)
    assert intake(store).keys == []


def test_a_claim_at_the_moment_of_announcing_is_not_undone(tmp_path: object) -> None:
    class Racing(FolderStore):
        """A run claims the drop between the intake's look and its note."""

        def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
            family, drop_id = key.removeprefix(layout.PENDING).removesuffix(".json").split("/")
            ledger.claim(self, family, drop_id, "run-1")
            return super().put_if_match(key, data, etag)

    store = Racing(tmp_path)  # type: ignore[arg-type]
    arrive(store, upload(store, "fam", "d1"))
    assert intake(store).keys == []
    assert list(ledger.pending(store)) == []


def test_a_marker_without_its_drop_waits_for_the_inbox(store: Store) -> None:
    store.put(layout.pending_key("fam", "0" * 32), b"{}")
    assert intake(store).keys == []


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("entry", [b"", b'{"family": "fam", "dr', b'{"family": "fam"}'], ids=["empty", "torn", "other"])
def test_an_entry_that_cannot_be_read_holds_up_no_other_family(
    store: Store, entry: bytes, batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    arrive(store, upload(store, "fam", "d1"))
    take_in(store, "b", "alias", lambda: Line(paused=True))
    ((family, drop_id),) = ledger.pending(store)
    store.put(layout.ledger_key(family, drop_id), entry)
    if batch:
        store.put(layout.pending_key(family, drop_id), b'{"batch": true, "drop": "d1"}')
    arrive(store, upload(store, "other", "d2", '{"text": "b"}'))
    (key,) = intake(store).keys
    assert "/other/d2/" in key
    assert "A drop of family fam gets no run: object " in caplog.text
    assert "Restore it from the bucket's versions, or delete it and write the drop's _SUCCESS again" in caplog.text


def test_the_line_is_asked_only_when_a_drop_waits(store: Store) -> None:
    def line() -> Line:
        raise AssertionError("asked for nothing")

    assert take_in(store, "b", "alias", line).keys == []


class Stream(FolderStore):
    """A bucket into which another drop is uploaded whenever somebody looks at the inbox."""

    count = 0

    def list(self, prefix: str = "") -> Any:
        if prefix == layout.INBOX:
            self.count += 1
            arrive(self, upload(self, "fam", f"d{self.count}", f'{{"text": "{self.count}"}}'))
        return super().list(prefix)


def test_drops_that_keep_coming_do_not_hold_up_those_that_are_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropforge_airflow.tasks.intake._OPEN", 0.05)
    store = Stream(tmp_path)
    first = intake(store)
    assert len(first.keys) == len(first.entered) == store.count
    assert len(intake(store).keys) == store.count - len(first.keys)


class Counted(FolderStore):
    """A bucket that counts what is asked of drops, and whether families are listed."""

    asked = 0

    def stat(self, key: str) -> Any:
        self.asked += key.startswith("drops/")
        return super().stat(key)

    def folders(self, prefix: str = "", most: int | None = None) -> Any:
        raise AssertionError("families are listed for messages that anybody may have sent")


def test_a_success_that_is_written_again_and_again_has_its_files_looked_at_once(tmp_path: Path) -> None:
    """A hundred small writes made a hundred looks at each file of the drop, behind which all families waited."""
    store = Counted(tmp_path)
    key = upload(store, "greedy", "d")
    for number in range(30):
        arrive(store, key, salt=str(number))
    arrive(store, upload(store, "other", "d", '{"text": "other"}'))
    done = intake(store)
    assert (len(done.keys), store.asked, list(store.list(layout.INBOX))) == (2, 2, [])


def test_messages_of_drops_that_nobody_uploaded_list_no_families(tmp_path: Path) -> None:
    """Each took a third of a second beside a thousand families, to name one for a person who is not there."""
    store = Counted(tmp_path)
    arrive(store, *(f"drops/fam-{number}/d/_SUCCESS" for number in range(100)))
    assert len(intake(store).gone) == 100


def test_families_are_looked_at_in_turn_and_those_entered_do_not_wait_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = datetime(2026, 11, 29, tzinfo=UTC)
    found = [FinishedDrop("b", DropName("greedy", f"d{number}"), at, f"e{number}") for number in range(3)]
    again = FinishedDrop("b", DropName("greedy", "d0"), at + timedelta(seconds=9), "e8")
    other = FinishedDrop("b", DropName("other", "d"), at + timedelta(seconds=5), "e9")
    assert in_turn([again, *found, other]) == [again, other, *found[1:]]

    store = FolderStore(tmp_path)
    for number in range(3):
        arrive(store, upload(store, "greedy", f"d{number}", f'{{"text": "{number}"}}'))
    arrive(store, upload(store, "other", "d", '{"text": "other"}'))
    monkeypatch.setattr("dropforge_airflow.tasks.intake._AT_ONCE", 1)
    clock = iter([0.0, 1.0, 2.0])  # when it begins, and at each look
    times = SimpleNamespace(monotonic=lambda: next(clock, 61.0), time=time.time)
    monkeypatch.setattr("dropforge_airflow.tasks.intake.time", times)
    done = intake(store)
    assert sorted(drop.family for drop in done.entered) == ["greedy", "other"]
    assert len(done.keys) == 2
    assert len(list(store.list(layout.INBOX))) == 2
    assert "2 drops are left to the next intake" in caplog.text
    monkeypatch.undo()
    assert len(intake(store).entered) == 2


class Broken(FolderStore):
    """A bucket that does not take one family's entries in the ledger."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key.startswith("ledger/drops/broken/"):
            raise OSError("the disk is full")
        return super().put_if_absent(key, data)


def test_an_error_with_one_drop_leaves_it_for_the_next_try_and_enters_the_others(tmp_path: Path) -> None:
    store = Broken(tmp_path)
    keys = [upload(store, family, "d", f'{{"text": "{family}"}}') for family in ("broken", "a", "z")]
    arrive(store, keys[2])
    arrive(store, *keys[:2])  # one message may tell of several drops
    done = intake(store)
    assert [str(error) for error in done.failed] == ["the disk is full"]
    assert sorted(key.split("/")[1] for key in done.keys) == ["a", "z"]
    assert [info.key.split("/")[2] for info in store.list("ledger/drops/")] == ["a", "z"]
    assert len(list(store.list(layout.INBOX))) == 1
    assert [drop.family for drop in intake(FolderStore(tmp_path)).entered] == ["broken"]


def test_an_intake_fails_for_an_entry_that_stays_only_if_it_has_no_event_to_send(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task that fails wanted to send is lost."""

    def refuse(_: Store, drop: Any) -> bool:
        if drop.family == "broken":
            raise OSError("the disk is full")
        return record(yard.store, drop)

    record = ledger.record
    monkeypatch.setattr(ledger, "record", refuse)
    for family in ("broken", "a"):
        arrive(yard.store, upload(yard.store, family, "d", f'{{"text": "{family}"}}'), bucket=yard.bucket)
    assert len(run_intake(Airflow(0), FINETUNE_DAG, tmp_path).keys) == 1
    with pytest.raises(OSError, match="the disk is full"):
        run_intake(Airflow(1), FINETUNE_DAG, tmp_path)


@pytest.mark.parametrize("name", ["_SUCCESS", "a.jsonl", "recipe.yaml"])
def test_an_object_in_an_archive_is_a_refusal_of_its_drop_alone(s3_store: S3Store, name: str) -> None:
    keys = [upload(s3_store, family, "d", f'{{"text": "{family}"}}') for family in ("evil", "honest")]
    s3_store.client.put_object(Bucket=s3_store.bucket, Key=f"drops/evil/d/{name}", Body=b"", StorageClass="GLACIER")
    arrive(s3_store, *keys)
    done = intake(s3_store)
    assert [key.split("/")[1] for key in done.keys] == ["honest"]
    assert (done.failed, list(s3_store.list(layout.INBOX))) == ([], [])
    letter = json.loads(s3_store.get(layout.refused_key("evil", "d")))
    assert name in letter["thing"]
    assert "it is archived (storage class GLACIER" in letter["cause"]
    assert "storage class STANDARD" in letter["mend"]
    upload(s3_store, "evil", "d", '{"text": "evil"}')
    s3_store.delete("drops/evil/d/recipe.yaml")
    arrive(s3_store, keys[0], salt="again")
    assert [key.split("/")[1] for key in intake(s3_store).keys] == ["evil"]


def test_an_error_that_nobody_foresaw_is_a_refusal_of_its_drop_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(place: Store, family: str, *rest: Any, **more: Any) -> Any:
        if family == "odd":
            raise ZeroDivisionError("none to divide by")
        return read_drop(place, family, *rest, **more)

    monkeypatch.setattr("dropforge_airflow.tasks.intake.read_drop", stumble)
    arrive(store, upload(store, "odd", "d"), upload(store, "fam", "d"))
    done = intake(store)
    assert [key.split("/")[1] for key in done.keys] == ["fam"]
    assert (done.failed, list(store.list(layout.INBOX))) == ([], [])
    assert "ZeroDivisionError: none to divide by" in json.loads(store.get(layout.refused_key("odd", "d")))["cause"]
    assert "Traceback" in caplog.text


def test_an_inbox_entry_that_is_nested_too_deep_is_removed(store: Store) -> None:
    store.put(layout.inbox_key("x"), b"[" * 200_000)
    arrive(store, upload(store, "fam", "d"))
    assert len(intake(store).keys) == 1
    assert list(store.list(layout.INBOX)) == []


def test_a_repair_of_what_its_checksum_did_not_fit_gets_a_run(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DROPFORGE_STATE", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    good = "".join(json.dumps({"text": f"row {number} of a drop"}) + "\n" for number in range(40))
    listed = json.dumps([{"key": "a.jsonl", "size": len(good), "sha256": hashlib.sha256(good.encode()).hexdigest()}])
    arrive(yard.store, upload(yard.store, "fam", "d", good.replace("row", "raw"), listed), bucket=yard.bucket)
    (drop,) = intake_of(yard).entered
    recipe = load_recipe("tiny", {"curation": {"workers": 1}}).plain()
    planned: Any = {"family": "fam", "drop_id": drop.id, "counter": 1, "recipe": recipe}
    ledger.claim(yard.store, "fam", drop.id, "run")
    with pytest.raises(AirflowFailException, match=r"a\.jsonl.*Upload changed data as a new drop"):
        data.curate(planned)
    arrive(yard.store, upload(yard.store, "fam", "d", good, listed), bucket=yard.bucket, salt="mended")
    assert [one.id for one in intake_of(yard).entered] == [drop.id]
    data.curate(planned)
    # From now on the checksum is that of bytes which were looked at: whoever lists it, uploads them again.
    key = upload(yard.store, "fam", "other", good.replace("row", "raw"), listed)
    arrive(yard.store, key, bucket=yard.bucket)
    assert len(intake_of(yard).known) == 1


def intake_of(yard: Yard) -> Intake:
    return take_in(yard.store, yard.bucket, "alias", Line)
