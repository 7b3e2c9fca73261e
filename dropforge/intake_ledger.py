"""What a family's rules of intake leave in the ledger: batches, drops that were superseded, and what is remembered.

Each step may be cut off and done again. A batch is there before its drops leave the line, and a drop leaves it by the
claim that a run would take, so of a run and a rule only one can win.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dropforge import layout, ledger, sources
from dropforge.drop import Drop
from dropforge.intake_rules import Known, Waiting, divide
from dropforge.json_objects import UNREADABLE, read_as, read_object
from dropforge.recipe_data import Source
from dropforge.store import MissingObjectError, Store

# So late a family's rules that were changed come into force, if no drop comes before.
ASLEEP: Final = timedelta(minutes=10)
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Superseded:
    """A drop that gets no run."""

    family: str
    drop: str
    id: str
    reason: str
    at: datetime


def waiting(drop_id: str, note: Mapping[str, Any]) -> Waiting:
    """A drop that waits, as its marker says; what an older marker does not say counts as long ago."""
    return Waiting(
        drop_id,
        str(note.get("drop", "")),
        _time(note.get("at")),
        _number(note.get("completed")),
        str(note.get("bucket", "")),
        announced=bool(note.get("times")),
        batch=bool(note.get("batch")),
        group=str(note.get("group") or ""),
        size=_number(note.get("bytes")),
        files=_number(note.get("files")),
    )


def by_entry(store: Store, drop: Drop, note: Mapping[str, Any], written: float) -> dict[str, Any]:
    """What a marker says, by the entry of its drop. :param note: what stands there; nothing in one that is torn.

    :param written: when the marker was, Unix time.
    """
    found = {"at": datetime.fromtimestamp(written, UTC).isoformat(), "completed": drop.again or drop.completed, **note}
    if drop.parts and store.stat(layout.batch_key(drop.family, drop.id)) is not None:
        found["batch"] = True
    return found | ledger.marked(drop)


def gather(store: Store, family: str, drops: Sequence[Waiting], recipe: Mapping[str, Any]) -> Drop:
    """Make one entry of several drops of one bucket, which waits for a run in their place.

    :param recipe: of the run, with the preset that it extends. :raises DataError: as `dropforge.sources.pin`.
    """
    ids = tuple(one.id for one in drops)
    batch = ledger.place(store, sources.pin(store, Source(drops=ids), family, drops[0].place))
    note = {"recipe": dict(recipe), "drops": ids, "at": datetime.now(UTC).isoformat()}
    store.put(layout.batch_key(family, batch.id), json.dumps(note, indent=1, ensure_ascii=False).encode())
    if not store.sizes(layout.claims_prefix(family, batch.id)):  # else the same drops were read as one before
        ledger.wait(store, batch, batch=True, completed=max(one.completed for one in drops))
    leave(store, batch)
    return batch


def leave(store: Store, batch: Drop) -> None:
    """The drops of a batch leave the line; one that a run has taken meanwhile stays that run's as well."""
    for part in batch.parts:
        ledger.claim(store, batch.family, part.id, f"batch {batch.id}", note={"batch": batch.id})


def separate(store: Store, family: str, drop_id: str, refusal: str) -> tuple[int, ...]:
    """Put the drops of a batch that was refused in line again, as two batches: one bad drop must not take the others
    with it. How many drops each has; nothing is done for a single one, and for what is no batch of a window.

    :param refusal: why, which may name a drop's file.
    """
    batch = ledger.read(store, family, drop_id)
    if len(batch.parts) < 2 or store.stat(layout.batch_key(family, drop_id)) is None:
        return ()
    groups = divide([part.drop for part in batch.parts], refusal)
    for part in batch.parts:
        group = f"{drop_id}-{'first' if part.drop in groups[0] else 'second'}"
        ledger.release(store, ledger.read(store, family, part.id), drop_id, group=group)
    return tuple(map(len, groups))


def batch_recipe(store: Store, family: str, drop_id: str) -> dict[str, Any] | None:
    """The recipe of a batch, with the preset that it extends; None for any other entry."""
    try:
        return read_as(store, layout.batch_key(family, drop_id), lambda note: dict(note["recipe"]))
    except MissingObjectError:
        return None


def supersede(store: Store, family: str, drop_id: str, name: str, reason: str) -> bool:
    """A drop gets no run, and that is told; False if a run was faster."""
    note = {"drop": name, "reason": reason, "at": datetime.now(UTC).isoformat()}
    owner = f"no run: {reason}"
    # Told first: what was cut off before the claim is done again, and the claim decides what is listed.
    store.put(layout.superseded_key(family, drop_id), json.dumps(note, indent=1, ensure_ascii=False).encode())
    if ledger.claim(store, family, drop_id, owner, note={"because": reason}) is not None:
        return True
    if ledger.superseded_because(store, family, drop_id) is None:
        store.delete(layout.superseded_key(family, drop_id))
    return False


def superseded(store: Store) -> Iterator[Superseded]:
    """All drops that were superseded."""
    for info in store.list(layout.SUPERSEDED):
        family, drop_id = layout.family_and_id(layout.SUPERSEDED, info.key)
        try:
            note = read_object(store, info.key)
            found = Superseded(family, str(note["drop"]), drop_id, str(note["reason"]), _time(note.get("at")))
            because = ledger.superseded_because(store, family, drop_id)
        except UNREADABLE:
            continue
        if because is not None:
            yield found


def revive(store: Store, one: Superseded) -> None:
    """The drop waits again, as if it had just been uploaded. :raises MissingObjectError: if its entry is gone."""
    drop = ledger.read(store, one.family, one.id)
    if ledger.superseded_because(store, one.family, one.id) is not None:
        store.delete(layout.claim_key(one.family, one.id, 1))
    ledger.wait(store, drop.model_copy(update={"completed": datetime.now(UTC).timestamp()}))
    forget(store, one)  # last, so that it can be done again


def forget(store: Store, one: Superseded) -> None:
    """List the drop no more; that it gets no run stays."""
    store.delete(layout.superseded_key(one.family, one.id))


@dataclass(frozen=True)
class State:
    """What is remembered of a family. :param etag: of the object; None if there is none.

    :param until: before that time nothing of the family can go on, so nobody needs to look.
    """

    known: Known = field(default_factory=Known)
    until: datetime | None = None
    etag: str | None = None


def read_state(store: Store, family: str) -> State:
    """What is remembered of a family; of what cannot be read nothing."""
    key = layout.rules_key(family)
    info = store.stat(key)
    if info is None:
        return State()
    try:
        values = read_object(store, key)
        announced = {str(one): _time(at) for one, at in dict(values["announced"]).items()}
        newest = values.get("newest")
        until = _time(values["until"]) if values.get("until") else None
        return State(
            Known(announced, waiting(str(newest["id"]), newest) if newest else None), until=until, etag=info.etag
        )
    except MissingObjectError:
        return State()
    except UNREADABLE:
        return State(etag=info.etag)


def write_state(store: Store, family: str, before: State, after: State) -> bool:
    """Remember, if nobody else has meanwhile; False if somebody has."""
    if (before.known, before.until) == (after.known, after.until):
        return True
    newest = after.known.newest
    values = {
        "announced": {one: at.isoformat() for one, at in after.known.announced.items()},
        "newest": newest
        and {
            "id": newest.id,
            "drop": newest.drop,
            "at": newest.at.isoformat(),
            "completed": newest.completed,
            "bucket": newest.place,
        },
        "until": after.until and after.until.isoformat(),
    }
    data = json.dumps(values, indent=1).encode()
    key = layout.rules_key(family)
    return store.put_if_absent(key, data) if before.etag is None else store.put_if_match(key, data, before.etag)


def asleep(store: Store, now: datetime) -> frozenset[str]:
    """Families of which nothing can go on yet; none sleeps for longer than `ASLEEP`, whatever the clock was set to."""
    names = [info.key.removeprefix(layout.RULES).removesuffix(".json") for info in store.list(layout.RULES)]
    untils = {name: read_state(store, name).until for name in names}
    return frozenset(name for name, until in untils.items() if until is not None and now < until <= now + ASLEEP)


def _number(value: object) -> float:
    try:
        return float(str(value)) if value is not None else 0.0
    except ValueError:
        return 0.0


def _time(text: object) -> datetime:
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return _LONG_AGO
    return at if at.tzinfo else at.replace(tzinfo=UTC)
