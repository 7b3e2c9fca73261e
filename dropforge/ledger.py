"""The ledger of drops in S3: what has arrived, what waits, and which run took it.

The ledger is the truth; Airflow's events only wake. Every step is a conditional PUT, so two intakes, or two runs,
cannot both win.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dropforge import layout
from dropforge.drop import Drop
from dropforge.store import MissingObjectError, Store


@dataclass(frozen=True)
class Claim:
    """The run that took a drop; `counter` is above 1 for forced re-runs."""

    family: str
    drop_id: str
    counter: int
    owner: str


def record(store: Store, drop: Drop) -> bool:
    """Enter a complete drop; False if the same bytes were entered before. A new drop becomes pending."""
    # Pending first: a crash between the two writes leaves a drop that is nudged, not one that is forgotten.
    if store.stat(layout.ledger_key(drop.family, drop.id)) is not None:
        return False
    store.put(layout.pending_key(drop.family, drop.id), _stamp({"drop": drop.drop}))
    return store.put_if_absent(layout.ledger_key(drop.family, drop.id), drop.to_json())


def place(store: Store, drop: Drop) -> Drop:
    """The entry of data that a recipe names, made if there is none. Nothing becomes pending: a run has them already.

    The same files may have been entered from another place, which counts as long as they are there unchanged.
    """
    if store.put_if_absent(layout.ledger_key(drop.family, drop.id), drop.to_json()):
        return drop
    known = read(store, drop.family, drop.id)
    if known == drop or all(_there(store, known.prefix + file.key, file.etag) for file in known.files):
        return known
    store.put(layout.ledger_key(drop.family, drop.id), drop.to_json())
    return drop


def _there(store: Store, key: str, etag: str) -> bool:
    info = store.stat(key)
    return info is not None and info.etag == etag


def read(store: Store, family: str, drop_id: str) -> Drop:
    """The drop as it was entered. :raises MissingObjectError: if it never was."""
    return Drop.from_json(store.get(layout.ledger_key(family, drop_id)))


def arrived(store: Store, family: str) -> tuple[Drop, ...]:
    """The family's uploads in the order in which they were entered; of those under one name the last.

    Nothing else records that order: two that were entered within a second stand by their names.
    """
    times = store.times(layout.entries_prefix(family))
    found = [(when, Drop.from_json(store.get(key))) for key, when in times.items()]
    order = sorted(((int(when), drop.drop, drop) for when, drop in found if drop.root is None), key=lambda one: one[:2])
    last = {drop.drop: drop for _, _, drop in order}
    return tuple(drop for _, name, drop in order if last[name].id == drop.id)


def pending(store: Store) -> Iterator[tuple[str, str]]:
    """(family, drop id) of every drop that no run has claimed."""
    for info in store.list(layout.PENDING):
        family, _, name = info.key.removeprefix(layout.PENDING).partition("/")
        yield family, name.removesuffix(".json")


def claim(store: Store, family: str, drop_id: str, owner: str, *, again: bool = False) -> Claim | None:
    """Take a drop for the run `owner`; None if another run has it.

    Asking twice with the same owner gives the same claim, so a retried task goes on. With `again`, a new counter
    is taken although the drop was trained on before.
    """
    counter = 0
    for info in store.list(layout.claims_prefix(family, drop_id)):
        taken = json.loads(store.get(info.key))
        if taken["owner"] == owner:
            store.delete(layout.pending_key(family, drop_id))
            return Claim(family, drop_id, taken["counter"], owner)
        counter = max(counter, int(taken["counter"]))
    while counter == 0 or again:
        counter += 1
        body = _stamp({"owner": owner, "counter": counter})
        if store.put_if_absent(layout.claim_key(family, drop_id, counter), body):
            store.delete(layout.pending_key(family, drop_id))
            return Claim(family, drop_id, counter, owner)
    # A crash after a claim may have left the marker behind; whoever finds the claim removes it.
    store.delete(layout.pending_key(family, drop_id))
    return None


def owner_of(store: Store, family: str, drop_id: str, counter: int = 1) -> str | None:
    """Who holds the claim, or None."""
    try:
        return str(json.loads(store.get(layout.claim_key(family, drop_id, counter)))["owner"])
    except MissingObjectError:
        return None


def _stamp(values: dict[str, Any]) -> bytes:
    return json.dumps({**values, "at": datetime.now(UTC).isoformat()}).encode()
