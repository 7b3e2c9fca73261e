"""The ledger: a drop is entered once, claimed once, and never forgotten in between."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dropforge import layout, ledger
from dropforge.drop import Drop, DropFile, Part, elsewhere
from dropforge.store import FolderStore, MissingObjectError, Store


def make(name: str = "d", content: str = "sha256:00", etag: str = "e") -> Drop:
    files = (DropFile(key="a.jsonl", size=1, content=content, etag=etag),)
    from dropforge.drop import identity

    return Drop(family="fam", drop=name, id=identity(files), bucket="b", files=files)


def test_a_drop_is_entered_once(store: Store) -> None:
    drop = lay(store, "d", b"x")
    assert ledger.record(store, drop)
    assert not ledger.record(store, lay(store, "other-name", b"x"))
    assert list(ledger.pending(store)) == [("fam", drop.id)]
    assert ledger.read(store, "fam", drop.id) == drop
    with pytest.raises(MissingObjectError):
        ledger.read(store, "fam", "unknown")


def test_one_of_many_runs_gets_the_claim(store: Store) -> None:
    drop = make()
    ledger.record(store, drop)
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda number: ledger.claim(store, "fam", drop.id, f"run-{number}"), range(8)))
    winners = [claim for claim in claims if claim is not None]
    assert len(winners) == 1
    assert ledger.owner_of(store, "fam", drop.id) == winners[0].owner
    assert list(ledger.pending(store)) == []


def test_a_retried_task_keeps_its_claim(store: Store) -> None:
    drop = make()
    ledger.record(store, drop)
    first = ledger.claim(store, "fam", drop.id, "run")
    assert ledger.claim(store, "fam", drop.id, "run") == first
    assert ledger.claim(store, "fam", drop.id, "other") is None


def test_again_takes_the_next_counter(store: Store) -> None:
    drop = make()
    ledger.record(store, drop)
    ledger.claim(store, "fam", drop.id, "one")
    again = ledger.claim(store, "fam", drop.id, "two", again=True)
    assert again is not None
    assert again.counter == 2
    assert ledger.claim(store, "fam", drop.id, "two", again=True) == again


def test_what_is_no_claim_keeps_nobody_from_the_drop(store: Store) -> None:
    drop = make()
    ledger.record(store, drop)
    for name in ("step-5/manifest.json", "x.json", "0.json", "1.json.part", f"{'9' * 40}.json"):
        store.put(layout.claims_prefix("fam", drop.id) + name, b"{}")
    assert ledger.newest_owner(store, "fam", drop.id) is None
    assert ledger.claim(store, "fam", drop.id, "run-1") is not None
    assert ledger.newest_owner(store, "fam", drop.id) == "run-1"


def test_a_crash_after_the_claim_leaves_nothing_pending(store: Store) -> None:
    drop = make()
    ledger.record(store, drop)
    ledger.claim(store, "fam", drop.id, "run")
    store.put(layout.pending_key("fam", drop.id), b"{}")  # as if the delete had not happened
    assert ledger.claim(store, "fam", drop.id, "other") is None
    assert list(ledger.pending(store)) == []


def test_a_crash_before_the_entry_is_mended_by_the_next_message(store: Store) -> None:
    drop = make()
    store.put(layout.pending_key("fam", drop.id), b"{}")
    assert ledger.record(store, drop)


def lay(store: Store, name: str, text: bytes) -> Drop:
    """Upload a file and list it under one checksum, whatever it holds."""
    store.put(f"{layout.drop_prefix('fam', name)}a.jsonl", text)
    info = store.stat(f"{layout.drop_prefix('fam', name)}a.jsonl")
    assert info is not None
    return make(name, etag=info.etag)


def test_other_bytes_under_a_checksum_that_nobody_has_looked_at_are_another_drop(store: Store) -> None:
    false, true = lay(store, "false", b"x"), lay(store, "true", b"y")
    assert ledger.record(store, false) == false
    ledger.claim(store, "fam", false.id, "of-the-false-one")
    entered = ledger.record(store, true)
    assert entered is not None
    assert (entered.id != false.id, entered.files) == (True, true.files)
    assert list(ledger.pending(store)) == [("fam", entered.id)]
    assert ledger.find(store, true) == entered
    assert ledger.find(store, false) == false
    for repeated in (false, true, lay(store, "true-too", b"y")):
        assert ledger.record(store, repeated) is None
    assert ledger.owner_of(store, "fam", false.id) == "of-the-false-one"


def test_once_a_run_has_read_them_the_same_checksums_are_the_same_bytes(store: Store) -> None:
    """As of a store whose tags differ for the same bytes."""
    first, again = lay(store, "first", b"x"), make("again", etag="another")
    ledger.record(store, first)
    ledger.prove(store, "fam", [first.id])
    assert (ledger.record(store, again), ledger.find(store, again)) == (None, first)
    store.delete_all(layout.drop_prefix("fam", "first"))
    assert ledger.record(store, again) is None


@pytest.mark.parametrize("name", ["first", "second"])
def test_what_was_repaired_or_moved_before_a_run_has_read_it_waits_again(store: Store, name: str) -> None:
    first = lay(store, "first", b"x")
    ledger.record(store, first)
    ledger.claim(store, "fam", first.id, "failed")
    store.delete_all(layout.drop_prefix("fam", "first"))
    mended = lay(store, name, b"y")
    assert ledger.record(store, mended) == mended
    assert ledger.read(store, "fam", first.id) == mended
    assert list(ledger.pending(store)) == [("fam", first.id)]
    assert ledger.claim(store, "fam", first.id, "next") is not None
    assert ledger.record(store, mended) is None


def later(store: Store, name: str, text: bytes, completed: float) -> Drop:
    """Upload a file and list it under its own checksum."""
    made = make(name, f"sha256:{text.hex()}", lay(store, name, text).files[0].etag)
    return made.model_copy(update={"completed": completed})


def test_bytes_whose_first_place_has_others_by_now_wait_where_they_lie(store: Store) -> None:
    bob, alice = later(store, "bob", b"x", 10), later(store, "alice", b"x", 20)
    assert (ledger.record(store, bob), ledger.record(store, alice)) == (bob, None)
    ledger.claim(store, "fam", bob.id, "failed")
    other = later(store, "bob", b"y", 30)
    assert ledger.record(store, other) == other
    assert ledger.record(store, alice) == alice
    assert set(ledger.pending(store)) == {("fam", other.id), ("fam", alice.id)}
    assert {drop.drop: drop.id for drop in ledger.arrived(store, "fam")} == {"bob": other.id, "alice": alice.id}
    assert ledger.record(store, alice) is None
    # Once a run has read them they need no other one, and still lie there.
    ledger.claim(store, "fam", alice.id, "first")
    ledger.prove(store, "fam", [alice.id])
    store.delete_all(layout.drop_prefix("fam", "alice"))
    assert ledger.record(store, later(store, "carol", b"x", 40)) is None
    assert {drop.drop: drop.id for drop in ledger.arrived(store, "fam")} == {"bob": other.id, "carol": alice.id}
    assert list(ledger.pending(store)) == [("fam", other.id)]


def test_of_uploads_under_one_name_the_last_counts_though_its_bytes_came_before(store: Store) -> None:
    between, one = later(store, "between", b"z", 15), later(store, "d", b"x", 10)
    for drop in (one, between, later(store, "d", b"y", 20)):
        assert ledger.record(store, drop) == drop
    ledger.claim(store, "fam", one.id, "first")
    ledger.prove(store, "fam", [one.id])
    again = later(store, "d", b"x", 30)
    for _ in range(2):
        assert ledger.record(store, again) is None
    assert [(drop.drop, drop.id) for drop in ledger.arrived(store, "fam")] == [("d", one.id), ("between", between.id)]
    assert ("fam", one.id) not in ledger.pending(store)
    # Nor does a message that comes late change that.
    assert ledger.record(store, one) is None
    assert ledger.read(store, "fam", one.id).again == 30


def test_of_two_that_come_at_once_none_is_lost(store: Store) -> None:
    drops = [lay(store, f"d{number}", bytes([number])) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        entered = list(pool.map(lambda drop: ledger.record(store, drop), drops))
    assert all(entered)
    assert {one for _, one in ledger.pending(store)} == {drop.id for drop in entered if drop is not None}
    assert [ledger.find(store, drop) for drop in drops] == entered


def test_of_one_upload_under_two_names_at_once_the_marker_has_the_name_of_the_entry(tmp_path: Path) -> None:
    files = FolderStore(tmp_path)
    one, other = lay(files, "one", b"x"), lay(files, "other", b"x")

    class Store(FolderStore):
        """One in which another intake is faster by the moment between two writes."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key == layout.ledger_key("fam", one.id):
                self.put(key, one.to_json())
            return super().put_if_absent(key, data)

    store = Store(tmp_path)
    assert ledger.record(store, other) is None
    assert ledger.read(store, "fam", one.id) == one
    assert json.loads(store.get(layout.pending_key("fam", one.id)))["drop"] == "one"


NAMED = {"drop": "source", "root": "lake/"}


@pytest.mark.parametrize(
    ("root", "parts"), [(None, ()), (elsewhere("b", "fam", "d"), ()), ("drops/fam/", (Part(drop="d0", id="id0"),))]
)
def test_an_upload_or_a_batch_stays_entered_whatever_a_recipe_names(
    store: Store, root: str | None, parts: tuple[Part, ...]
) -> None:
    known = make().model_copy(update={"root": root, "parts": parts})
    assert ledger.record(store, known) == known
    named = make().model_copy(update=NAMED)
    placed = ledger.place(store, named)
    assert ledger.read(store, "fam", known.id) == known
    assert placed == named.model_copy(update={"id": placed.id}) == ledger.read(store, "fam", placed.id)
    assert (placed.id != known.id, ledger.place(store, named)) == (True, placed)


def test_a_batch_is_no_upload_that_holds_the_same_files(store: Store) -> None:
    known = lay(store, "all", b"x")
    ledger.record(store, known)
    batch = known.model_copy(update={"drop": "source", "root": "drops/fam/", "parts": (Part(drop="d0", id="id0"),)})
    assert ledger.place(store, batch).parts == batch.parts
    assert ledger.read(store, "fam", known.id) == known


def test_data_of_a_recipe_that_are_gone_make_room_for_the_same_from_elsewhere(store: Store) -> None:
    ledger.place(store, make().model_copy(update=NAMED))
    moved = make().model_copy(update={**NAMED, "root": "lake-2/"})
    assert ledger.place(store, moved) == moved == ledger.read(store, "fam", moved.id)
