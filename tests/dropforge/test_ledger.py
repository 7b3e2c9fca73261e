"""The ledger: a drop is entered once, claimed once, and never forgotten in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dropforge import layout, ledger
from dropforge.drop import Drop, DropFile
from dropforge.store import MissingObjectError, Store


def make(name: str = "d", content: str = "sha256:00") -> Drop:
    files = (DropFile(key="a.jsonl", size=1, content=content, etag="e"),)
    from dropforge.drop import identity

    return Drop(family="fam", drop=name, id=identity(files), bucket="b", files=files)


def test_a_drop_is_entered_once(store: Store) -> None:
    drop = make()
    assert ledger.record(store, drop)
    assert not ledger.record(store, make("other-name"))
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
