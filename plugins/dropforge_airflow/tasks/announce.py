"""From the drops that wait to the partition events that are to be sent, by their families' rules of intake."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from dropforge import fair_share, in_flight, intake_ledger, layout, ledger
from dropforge.drop import partition_key
from dropforge.errors import DropforgeError
from dropforge.fair_share import RunSlots
from dropforge.families import Family
from dropforge.intake_ledger import State
from dropforge.intake_rules import Waiting, decide, remember
from dropforge.store import MissingObjectError, ObjectInfo, Store
from dropforge_airflow.backlog import Nudged, deserves_event

log = logging.getLogger(__name__)

Rules = Callable[[str], Family | None]
"""The file of a family; raises `DropforgeError` for one that is broken."""

# So late a family's rules that were changed come into force, if no drop comes before.
_ASLEEP = timedelta(minutes=10)


@dataclass(frozen=True)
class Line:
    """What the fine-tune DAG has before it.

    :param unclaimed: how many of its runs have yet to claim a drop. :param active: how many have not ended.
    :param going: which of some of its runs have not ended.
    """

    paused: bool = False
    unclaimed: int = 0
    active: int = 0
    going: Callable[[Sequence[str]], Set[str]] = frozenset


@dataclass(frozen=True)
class Marker:
    """A drop that waits for a run. :param note: what its object says."""

    info: ObjectInfo
    note: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.info.key.removeprefix(layout.PENDING).partition("/")[0]

    @property
    def id(self) -> str:
        return self.info.key.rpartition("/")[2].removesuffix(".json")

    @property
    def nudged(self) -> Nudged:
        try:
            times, last = int(self.note.get("times", 0)), self.note.get("last")
            return Nudged(times, datetime.fromisoformat(last) if last is not None else None)
        except (ValueError, TypeError):
            return Nudged()  # an unreadable marker counts as never announced


def events_to_send(
    store: Store,
    aliases: Mapping[str, str],
    line: Callable[[], Line],
    rules: Rules,
    slots: RunSlots,
    pool: ThreadPoolExecutor,
) -> list[str]:
    """The partition keys to send now; each is noted in its drop's marker before.

    :param aliases: of the buckets. :param line: asked only when a drop waits. :param slots: for runs.
    """
    if not list(store.list(layout.PENDING)):
        return []
    ahead = line()
    now = datetime.now(UTC)
    if ahead.paused:
        # Airflow drops the events of a paused DAG; sending them would only raise the pauses between them.
        number = len(store.sizes(layout.PENDING))
        log.warning("%d drops wait: the fine-tune DAG is paused. Once it runs, they start within a minute", number)
        return []
    markers, limits = _allowed(store, _markers(store, layout.PENDING, pool), rules, now, pool)
    sent = [marker for marker in markers if marker.nudged.times]
    fresh = [marker for marker in markers if not marker.nudged.times]
    # As many runs have yet to claim as drops were announced: no event was lost, they only wait their turn.
    in_line = ahead.unclaimed >= len(sent)
    due = [] if in_line else [marker for marker in sent if deserves_event(marker.nudged, now)]
    # Events that have no run yet will have one.
    taken = ahead.active + max(0, len(sent) - ahead.unclaimed)
    due += _shared(store, fresh, sent, limits, slots, taken, ahead, pool) if fresh else []
    return list(filter(None, pool.map(lambda marker: _announce(store, marker, now, aliases), due)))


def _shared(
    store: Store,
    fresh: Sequence[Marker],
    sent: Sequence[Marker],
    limits: Mapping[str, int],
    slots: RunSlots,
    taken: int,
    ahead: Line,
    pool: ThreadPoolExecutor,
) -> list[Marker]:
    """The drops that get a slot now; the others are told why they wait."""
    flying = _flying(store, sent, ahead, pool)
    by_id = {(marker.family, marker.id): marker for marker in fresh}
    families = {
        name: fair_share.FamilyLoad(
            [intake_ledger.waiting(marker.id, marker.note) for marker in fresh if marker.family == name],
            flying[name],
            limits.get(name),
        )
        for name in {marker.family for marker in fresh}
    }
    shared = fair_share.share(families, slots, taken)
    list(pool.map(lambda one: _hold(store, by_id[one[0]], one[1]), shared.held.items()))
    return [by_id[one] for one in shared.go]


def _flying(store: Store, sent: Sequence[Marker], ahead: Line, pool: ThreadPoolExecutor) -> Counter[str]:
    """How many runs of each family are in flight; what is noted of others that have ended is taken away."""
    unclaimed = {(marker.family, marker.id) for marker in sent}
    noted = [one for one in in_flight.entries(store) if one not in unclaimed]
    owners = dict(zip(noted, pool.map(lambda one: ledger.owner_of(store, *one), noted), strict=True))
    going = ahead.going(sorted({owner for owner in owners.values() if owner}))
    ended = [one for one, owner in owners.items() if owner not in going]
    list(pool.map(lambda one: in_flight.leave(store, *one), ended))
    return Counter(family for family, _ in unclaimed | (owners.keys() - set(ended)))


def _markers(store: Store, prefix: str, pool: ThreadPoolExecutor) -> list[Marker]:
    return list(filter(None, pool.map(partial(_read, store), store.list(prefix))))


def _read(store: Store, info: ObjectInfo) -> Marker | None:
    """A marker; None if its drop was claimed meanwhile."""
    try:
        note = json.loads(store.get(info.key))
    except MissingObjectError:
        return None
    except ValueError:
        note = {}
    return Marker(info, note if isinstance(note, dict) else {})


def _allowed(
    store: Store, markers: Sequence[Marker], rules: Rules, now: datetime, pool: ThreadPoolExecutor
) -> tuple[list[Marker], dict[str, int]]:
    """The drops whose events may be sent, by the rules of their families; and how many runs of some may be in flight"""
    families: dict[str, list[Marker]] = {}
    for marker in markers:
        families.setdefault(marker.family, []).append(marker)
    found: list[Marker] = []
    limits: dict[str, int] = {}
    for name, its in families.items():
        try:
            family = rules(name)
        except DropforgeError as error:
            # Whether there are rules nobody can tell, and a thousand runs cannot be taken back.
            log.error("Drops of family %s wait until its file is mended. %s", name, error)
            found += [marker for marker in its if marker.nudged.times]
            continue
        if family is None or family.intake is None:
            found += its
            continue
        if family.intake.max_active_runs is not None:
            limits[name] = family.intake.max_active_runs
        found += _ruled(store, name, family, its, now, pool)
    return found, limits


def _ruled(
    store: Store, name: str, family: Family, markers: Sequence[Marker], now: datetime, pool: ThreadPoolExecutor
) -> list[Marker]:
    assert family.intake is not None
    state = intake_ledger.read_state(store, name)
    by_id = {marker.id: marker for marker in _settled(store, name, markers, pool)}
    waiting = [intake_ledger.waiting(one, marker.note) for one, marker in by_id.items()]
    decided = decide(family.intake, waiting, state.known, now)
    after = remember(family.intake, waiting, state.known, decided.go, now)
    until = None
    if by_id and len(decided.held) == len(by_id) and decided.until is not None:
        until = min(decided.until, now + _ASLEEP)
    # Before anything is done by it: who was faster has decided on the same drops.
    if not intake_ledger.write_state(store, name, state, State(after, until)):
        log.info("Another intake looks at family %s", name)
        return []
    for one, reason in decided.passed.items():
        if intake_ledger.supersede(store, name, one, str(by_id[one].note.get("drop", "")), reason):
            log.info("Drop %s/%s gets no run: %s", name, by_id[one].note.get("drop"), reason)
    for one, reason in decided.held.items():
        _hold(store, by_id[one], reason)
    made = [_gather(store, name, family, [one for one in waiting if one.id in ids]) for ids in decided.batches]
    if not any(made):
        return [by_id[one] for one in decided.go]
    # The batches wait now in the place of their drops, and take the turns that were counted for them.
    return _ruled(store, name, family, _markers(store, f"{layout.PENDING}{name}/", pool), now, pool)


def _settled(store: Store, name: str, markers: Sequence[Marker], pool: ThreadPoolExecutor) -> list[Marker]:
    """The markers with an entry in the ledger, less the drops of batches, which an intake that was cut off left."""
    entries = store.sizes(layout.entries_prefix(name))
    known = [marker for marker in markers if layout.ledger_key(name, marker.id) in entries]
    batches = [marker for marker in known if marker.note.get("batch")]
    gone: set[str] = set()
    for batch in pool.map(lambda marker: ledger.read(store, name, marker.id), batches):
        left = {part.id for part in batch.parts} & {marker.id for marker in known}
        if left:
            intake_ledger.leave(store, batch)
        gone |= left
    return [marker for marker in known if marker.id not in gone]


def _gather(store: Store, name: str, family: Family, drops: Sequence[Waiting]) -> bool:
    """Make one of several drops; False if that cannot be done, and then they go on waiting."""
    recipe = {**family.overrides(), "extends": family.preset}
    try:
        batch = intake_ledger.gather(store, name, drops, recipe)
    except DropforgeError as error:
        log.error("Drops of family %s cannot become one run: %s", name, error)
        return False
    log.info("Drops %s of family %s become one run, as batch %s", [one.drop for one in drops], name, batch.id)
    return True


def _hold(store: Store, marker: Marker, reason: str) -> None:
    """Say in the marker why its drop waits."""
    if marker.note.get("held") != reason:
        note = {**marker.note, "held": reason}
        if store.put_if_match(marker.info.key, json.dumps(note).encode(), marker.info.etag):
            log.info("Drop %s/%s waits: %s", marker.family, marker.note.get("drop"), reason)


def _announce(store: Store, marker: Marker, now: datetime, aliases: Mapping[str, str]) -> str | None:
    """The key to send for a waiting drop, noted in its marker; None if it was claimed meanwhile."""
    try:
        drop = ledger.read(store, marker.family, marker.id)
    except MissingObjectError:
        return None  # its entry in the inbox, which is still there, will bring it again
    # First: a run that nobody knows of would take its family's slot twice.
    in_flight.enter(store, drop.family, drop.id)
    before = {key: value for key, value in marker.note.items() if key != "held"}
    note = {**before, "drop": drop.drop, "times": marker.nudged.times + 1, "last": now.isoformat()}
    # Conditional, so that a claim which removes the marker at this moment is not undone.
    if not store.put_if_match(marker.info.key, json.dumps(note).encode(), marker.info.etag):
        return None
    if marker.nudged.times:
        log.warning("Drop %s/%s has no run yet: its event is sent again", drop.family, drop.drop)
    return partition_key(aliases.get(drop.bucket, drop.bucket), drop)
