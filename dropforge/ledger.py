"""The ledger of drops in S3: what has arrived, what waits, and which run took it.

The ledger is the truth; Airflow's events only wake. Every step is a conditional PUT, so two intakes, or two runs,
cannot both win.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dropforge import layout
from dropforge.drop import Drop, fault, identity_of_objects, listed_keys
from dropforge.json_objects import MOST_LISTED, UnreadableError, read_as, read_object
from dropforge.store import MissingObjectError, Store, TooLargeError, read_bounded

_COUNTER: Final = re.compile(r"([1-9][0-9]{0,8})\.json", re.ASCII)
_MEND: Final = "Restore it from the bucket's versions, or delete it if no run has the drop"
_MEND_ENTRY: Final = "Restore it from the bucket's versions, or delete it and write the drop's _SUCCESS again"


@dataclass(frozen=True)
class Claim:
    """The run that took a drop; `counter` is above 1 for forced re-runs.

    By the family's rules of intake it may be no run: the drop is part of a batch, or gets none (`because`).
    :param at: when it was taken, in UTC as ISO 8601 has it.
    """

    family: str
    drop_id: str
    counter: int
    owner: str
    at: str = ""


def record(store: Store, drop: Drop) -> Drop | None:
    """Enter a complete drop, and return its entry; None if the same bytes were entered before. It becomes pending.

    Bytes that were entered before may lie elsewhere by now, or be under their name again after others: see `_moved`.

    Two drops may list the same checksums and hold other bytes. Where no run has read the first one's files, and these
    are gone or were changed, it takes the place of the first one; where they are there, its id is that of its objects.
    """
    known = _find_entry(store, drop.family, drop.id)
    if known is None:  # of two that come at once the second one may hold other bytes
        return drop if _enter(store, drop) else record(store, drop)
    if (held := _holding(store, known, drop)) is not None:
        return _moved(store, held, drop)
    if _may_be_there(store, known):
        own = drop.model_copy(update={"id": identity_of_objects(drop)})
        return own if _enter(store, own) else None
    return _replace(store, drop)


def _replace(store: Store, drop: Drop, completed: float | None = None) -> Drop:
    """Put a drop that waits for a run in the place of an entry. :param completed: by which it waits, if not its own."""
    # Pending first, the entry last: a crash in between is mended by the next message.
    wait(store, drop, **({} if completed is None else {"completed": completed}))
    store.delete_all(layout.claims_prefix(drop.family, drop.id))
    store.delete(layout.superseded_key(drop.family, drop.id))
    store.put(layout.ledger_key(drop.family, drop.id), drop.to_json())
    return drop


def _moved(store: Store, held: Drop, drop: Drop) -> Drop | None:
    """Note in an entry that its bytes were uploaded again; returned if they wait for a run by that.

    They do where the entry's files are gone, under another name, before a run has read them; and where a rule of
    the family has passed them over for what was uploaded since, under their name or at all.
    """
    if not held.uploaded:
        return None
    if held.prefix == drop.prefix:
        if drop.completed <= max(held.completed, held.again):
            return None
    elif _may_be_there(store, held):
        return None
    elif store.stat(layout.proven_key(held.family, held.id)) is None:
        return _replace(store, drop.model_copy(update={"id": held.id}))
    # The family's order stays: a calendar takes what came after the champion's drops.
    moved = drop.model_copy(update={"id": held.id, "completed": held.completed, "again": drop.completed})
    if superseded_because(store, held.family, held.id) is not None:
        return _replace(store, moved, completed=moved.again)
    if (marker := store.stat(layout.pending_key(held.family, held.id))) is not None:
        with suppress(MissingObjectError, UnreadableError):
            note = {**read_object(store, marker.key), "drop": moved.drop, "completed": moved.again}
            store.put_if_match(marker.key, json.dumps(note).encode(), marker.etag)
    store.put(layout.ledger_key(held.family, held.id), moved.to_json())
    return None


def _enter(store: Store, drop: Drop) -> bool:
    """Make the entry of a drop that waits for a run; False if there is one of its id."""
    # Pending first: a crash between the two writes leaves a drop that is nudged, not one that is forgotten.
    wait(store, drop)
    if store.put_if_absent(layout.ledger_key(drop.family, drop.id), drop.to_json()):
        return True
    if (known := _find_entry(store, drop.family, drop.id)) is not None:
        wait(store, known)  # it was uploaded under another name at the same time, which the marker is to have
    return False


def find(store: Store, drop: Drop) -> Drop | None:
    """Return the entry that holds the bytes of a drop, whoever uploaded them; None if there is none."""
    known = _find_entry(store, drop.family, drop.id)
    return None if known is None else _holding(store, known, drop)


def _holding(store: Store, known: Drop, drop: Drop) -> Drop | None:
    """Which entry holds the bytes of a drop. :param known: that of its id."""
    if _objects(known) == _objects(drop) or store.stat(layout.proven_key(drop.family, drop.id)) is not None:
        return known
    return _find_entry(store, drop.family, identity_of_objects(drop))


def _objects(drop: Drop) -> dict[str, tuple[int, str]]:
    return {file.key: (file.size, file.etag) for file in drop.files}


def _may_be_there(store: Store, drop: Drop) -> bool:
    """Whether the files of an entry are still there, which of those in another bucket nobody looks at."""
    return "://" in drop.prefix or _is_there(store, drop)


def _is_there(store: Store, drop: Drop) -> bool:
    """Whether the files of an entry are still the objects that it names."""
    etags = {info.key.removeprefix(drop.prefix): info.etag for info in listed_keys(store, drop.prefix)}
    return all(etags.get(file.key) == file.etag for file in drop.files)


def prove(store: Store, family: str, drop_ids: Iterable[str]) -> None:
    """Note that a run has read the files of drops, and that they are what these promised."""
    for drop_id in drop_ids:
        store.put_if_absent(layout.proven_key(family, drop_id), _stamp({}))


def _find_entry(store: Store, family: str, drop_id: str) -> Drop | None:
    try:
        return read(store, family, drop_id)
    except MissingObjectError:
        return None


def last_entry(store: Store, family: str) -> float:
    """When the family's last entry was made, as the store tells it (Unix time); 0 if it has none."""
    return max(store.times(layout.entries_prefix(family)).values(), default=0.0)


def in_order(drop: Drop, last: float, now: float) -> Drop:
    """The drop as it is to be entered now: after the last entry, though that be from the future.

    Then the clock was set back since, and the order of the family's uploads would be wrong for good.
    :param last: as `last_entry` tells it.
    """
    if last <= now:
        return drop
    return drop.model_copy(update={"completed": max(drop.completed, int(last) + 1.0)})


def wait(store: Store, drop: Drop, **more: Any) -> None:
    """Put the drop's marker: it waits for a run."""
    note = {**marked(drop), "completed": drop.completed, **more}
    store.put(layout.pending_key(drop.family, drop.id), _stamp(note))


def marked(drop: Drop) -> dict[str, Any]:
    """What a drop's marker says of its entry, by which it may be filled again."""
    return {"drop": drop.drop, "bucket": drop.bucket, "bytes": drop.total_bytes, "files": len(drop.files)}


def place(store: Store, drop: Drop) -> Drop:
    """The entry of data that a recipe names, made if there is none. Nothing becomes pending: a run has them already.

    The same files may have been entered from another place, which counts as long as they are there unchanged. What was
    uploaded, or is made of other uploads, stays as it was entered: the data get an entry of their own beside it.
    """
    if store.put_if_absent(layout.ledger_key(drop.family, drop.id), drop.to_json()):
        return drop
    known = read(store, drop.family, drop.id)
    same_parts = set(known.parts) == set(drop.parts)
    if known == drop or ((same_parts or not drop.parts) and _is_there(store, known)):
        return known
    if known.uploaded or not same_parts:
        return place(store, drop.model_copy(update={"id": identity_of_objects(drop)}))
    store.put(layout.ledger_key(drop.family, drop.id), drop.to_json())
    return drop


def read(store: Store, family: str, drop_id: str) -> Drop:
    """The drop as it was entered. :raises MissingObjectError: if it never was.

    :raises UnreadableError: if it cannot be read, or is of another family.
    """
    found = read_entry(store, key := layout.ledger_key(family, drop_id))
    if found.family != family:
        raise UnreadableError(f"object {store.uri}/{key}", f"it is of family {found.family!r:.80}", _MEND_ENTRY)
    return found


def read_entry(store: Store, key: str) -> Drop:
    """The drop of an entry. :raises MissingObjectError: if it is not there.

    :raises UnreadableError: if it cannot be read, or is larger than the entry of a drop of the most files.
    """
    thing = f"object {store.uri}/{key}"
    try:
        return Drop.from_json(read_bounded(store, key, MOST_LISTED))
    except TooLargeError as error:
        cause = error.cause
    except ValueError as error:
        cause = fault(error)
    raise UnreadableError(thing, f"it cannot be read: {cause}", _MEND_ENTRY)


def arrived(store: Store, family: str) -> tuple[Drop, ...]:
    """The family's uploads in the order in which they were completed; of those under one name the last, though the
    same bytes had been there before.

    Of an entry that does not say it, the time of the entry counts. Two within a second stand by their names.

    :raises UnreadableError: if an entry cannot be read: without it, the family's rows would be others.
    """
    times = store.times(layout.entries_prefix(family))
    found = [(when, read_entry(store, key)) for key, when in times.items()]
    order = sorted(
        ((int(drop.completed or when), int(when), drop.drop, drop) for when, drop in found if drop.uploaded),
        key=lambda one: one[:3],
    )
    last = {drop.drop: drop for *_, drop in sorted(order, key=lambda one: max(one[0], int(one[-1].again)))}
    return tuple(drop for *_, name, drop in order if last[name].id == drop.id)


def pending(store: Store) -> Iterator[tuple[str, str]]:
    """(family, drop id) of every drop that no run has claimed."""
    for info in store.list(layout.PENDING):
        yield layout.family_and_id(layout.PENDING, info.key)


def claim(
    store: Store, family: str, drop_id: str, owner: str, *, again: bool = False, note: Mapping[str, Any] | None = None
) -> Claim | None:
    """Take a drop for the run `owner`; None if another run has it.

    Asking twice with the same owner gives the same claim, so a retried task goes on. With `again`, a new counter
    is taken although the drop was trained on before. :param note: is kept with the claim.
    :raises UnreadableError: if a claim of the drop cannot be read.
    """
    counter = 0
    for _, key in _claims(store, family, drop_id):
        taken = read_as(store, key, _taken, _MEND)
        if taken["owner"] == owner:
            store.delete(layout.pending_key(family, drop_id))
            return Claim(family, drop_id, taken["counter"], owner, str(taken.get("at") or ""))
        counter = max(counter, taken["counter"])
    while counter == 0 or again:
        counter += 1
        body = _stamp({**(note or {}), "owner": owner, "counter": counter})
        if store.put_if_absent(layout.claim_key(family, drop_id, counter), body):
            store.delete(layout.pending_key(family, drop_id))
            return Claim(family, drop_id, counter, owner, json.loads(body)["at"])
    # A crash after a claim may have left the marker behind; whoever finds the claim removes it.
    store.delete(layout.pending_key(family, drop_id))
    return None


def _claims(store: Store, family: str, drop_id: str) -> list[tuple[int, str]]:
    """The counters of a drop's claims with their keys; what else lies there is none."""
    prefix = layout.claims_prefix(family, drop_id)
    named = ((_COUNTER.fullmatch(info.key.removeprefix(prefix)), info.key) for info in store.list(prefix))
    return sorted((int(match[1]), key) for match, key in named if match is not None)


def release(store: Store, drop: Drop, batch: str, **more: Any) -> bool:
    """Put a part of a batch in line again; False if it stands there, or was taken otherwise since.

    May be done again at any moment. :param more: what its marker says besides.
    """
    taken = _claimed(store, drop.family, drop.id)
    waits = store.stat(layout.pending_key(drop.family, drop.id)) is not None
    if waits if taken is None else taken.get("batch") != batch:
        return False
    store.delete(layout.claim_key(drop.family, drop.id, 1))
    wait(store, drop, **more)
    return True


def _taken(values: dict[str, Any]) -> dict[str, Any]:
    """What a claim says, with its owner; the counter counts of those that have one."""
    return {**values, "owner": str(values["owner"]), "counter": int(values.get("counter", 1))}


def _claimed(store: Store, family: str, drop_id: str, counter: int = 1) -> dict[str, Any] | None:
    """What a claim says; None if there is none. :raises UnreadableError: if it cannot be read."""
    try:
        return read_as(store, layout.claim_key(family, drop_id, counter), _taken, _MEND)
    except MissingObjectError:
        return None


def run_of(store: Store, family: str, claimed: Mapping[str, Any]) -> str | None:
    """The run behind what a claim says, that of its batch if the drop is part of one; None if there is none yet."""
    if claimed.get("batch") is not None:
        batch = _claimed(store, family, str(claimed["batch"]), 1)
        if batch is None:
            return None
        if batch.get("batch") is not None:
            thing = f"claim {layout.claim_key(family, str(claimed['batch']), 1)}"
            raise UnreadableError(thing, "it says that a batch is part of another one", _MEND)
        claimed = batch
    return None if claimed.get("because") is not None else str(claimed["owner"])


def owner_of(store: Store, family: str, drop_id: str, counter: int = 1) -> str | None:
    """The run that holds the claim, that of its batch if it is part of one; None if there is none, or none yet."""
    claimed = _claimed(store, family, drop_id, counter)
    return None if claimed is None else run_of(store, family, claimed)


def superseded_because(store: Store, family: str, drop_id: str) -> str | None:
    """Why the drop gets no run, by its family's rules of intake; None if it is none of those."""
    because = (_claimed(store, family, drop_id) or {}).get("because")
    return None if because is None else str(because)


def held(store: Store, family: str, drop_id: str) -> str | None:
    """Why the drop still waits, by its family's rules of intake; None if it does not, or they do not say."""
    try:
        why = read_object(store, layout.pending_key(family, drop_id)).get("held")
    except (MissingObjectError, UnreadableError):
        return None
    return None if why is None else str(why)


def newest_owner(store: Store, family: str, drop_id: str) -> str | None:
    """The last run that took the drop; None if none has."""
    found = (owner_of(store, family, drop_id, counter) for counter, _ in reversed(_claims(store, family, drop_id)))
    return next(filter(None, found), None)


def owners(store: Store, family: str, drop_id: str) -> list[str]:
    """The runs that took the drop, the first one first."""
    found = (owner_of(store, family, drop_id, counter) for counter, _ in _claims(store, family, drop_id))
    return [owner for owner in found if owner is not None]


def taken_by(store: Store, family: str, drop_id: str) -> str:
    """Why a drop is not to be had, in a clause."""
    taken = _claimed(store, family, drop_id) or {"owner": "another run"}
    if taken.get("because") is not None:
        return f"gets no run: {taken['because']}"
    run = run_of(store, family, taken)
    if taken.get("batch") is not None:
        return f"is part of batch {taken['batch']}" + (f", which belongs to run {run}" if run else "")
    return f"belongs to run {run}"


def _stamp(values: dict[str, Any]) -> bytes:
    return json.dumps({**values, "at": datetime.now(UTC).isoformat()}).encode()
