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
from dropforge.fair_share import FamilyLoad, RunSlots
from dropforge.families import Family
from dropforge.intake_ledger import State
from dropforge.intake_rules import Intake as IntakeRules
from dropforge.intake_rules import Known, Waiting, decide, remember
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
    :param going: which of some of its runs have not ended. :param slots: how many there may be.
    """

    paused: bool = False
    unclaimed: int = 0
    active: int = 0
    going: Callable[[Sequence[str]], Set[str]] = frozenset
    slots: RunSlots = field(default_factory=RunSlots)


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
    store: Store, aliases: Mapping[str, str], line: Callable[[], Line], rules: Rules, pool: ThreadPoolExecutor
) -> list[str]:
    """The partition keys to send now; each is noted in its drop's marker before.

    :param aliases: of the buckets. :param line: asked only when a drop waits.
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
    waiting = _markers(store, layout.PENDING, pool)
    sent = [marker for marker in waiting if marker.nudged.times]
    # As many runs have yet to claim as drops were announced: no event was lost, they only wait their turn.
    in_line = ahead.unclaimed >= len(sent)
    ruled = _allowed(store, waiting, rules, now, pool)
    allowed = [marker for one in ruled for marker in one.markers]
    due = [marker for marker in allowed if marker.nudged.times and not in_line and deserves_event(marker.nudged, now)]
    fresh = [one for one in ruled if any(not marker.nudged.times for marker in one.markers)]
    if fresh:
        # Events that have no run yet will have one.
        taken = ahead.active + max(0, len(sent) - ahead.unclaimed)
        flying = _flying(store, sent, ahead, pool)
        due += _shared(store, fresh, flying, ahead.slots, taken, now, pool)
    return list(filter(None, pool.map(lambda marker: _announce(store, marker, now, aliases), due)))


def _shared(
    store: Store,
    ruled: Sequence[Ruled],
    flying: Set[tuple[str, str]],
    slots: RunSlots,
    taken: int,
    now: datetime,
    pool: ThreadPoolExecutor,
) -> list[Marker]:
    """The drops that get a run now; the others are told why they wait."""
    by_id = {(marker.family, marker.id): marker for one in ruled for marker in one.markers if not marker.nudged.times}
    # An intake was cut off before it sent their events, or sends them now, which only one of two can.
    begun = [by_id.pop(one) for one in flying & by_id.keys()]
    counts = Counter(family for family, _ in flying)
    while True:
        families: dict[str, list[Waiting]] = {}
        for (name, _), marker in by_id.items():
            families.setdefault(name, []).append(intake_ledger.waiting(marker.id, marker.note))
        loads = {one.family: FamilyLoad(families.get(one.family, ()), counts[one.family], one.limit) for one in ruled}
        shared = fair_share.share(loads, slots, taken)
        there = pool.map(lambda one: store.stat(layout.ledger_key(*one)) is not None, shared.go)
        # A marker whose drop is not in the ledger yet takes nobody's place: its entry in the inbox brings it again.
        if not (without := [one for one, found in zip(shared.go, there, strict=True) if not found]):
            break
        for one in without:
            del by_id[one]
    list(pool.map(lambda one: _hold(store, by_id[one[0]], one[1]), shared.held.items()))
    refused = {one.family for one in ruled if not _turns_taken(store, one, shared.go, now)}
    return begun + [by_id[one] for one in shared.go if one[0] not in refused]


def _turns_taken(store: Store, one: Ruled, go: Sequence[tuple[str, str]], now: datetime) -> bool:
    """Count the turns of a family's rate for what goes; False if another intake has changed what was counted."""
    ids = [drop_id for family, drop_id in go if family == one.family]
    if one.rules is None or one.rules.limit is None or not ids:
        return True
    state = intake_ledger.read_state(store, one.family)
    if state.known.announced != one.known.announced:
        log.info("Another intake looks at family %s", one.family)
        return False
    waiting = [intake_ledger.waiting(marker.id, marker.note) for marker in one.markers]
    announced = [drop.id for drop in waiting if drop.announced or drop.id in state.known.announced]
    after = remember(one.rules, waiting, state.known, [*announced, *ids], now)
    return intake_ledger.write_state(store, one.family, state, State(after))


def _flying(store: Store, sent: Sequence[Marker], ahead: Line, pool: ThreadPoolExecutor) -> Set[tuple[str, str]]:
    """Family and id of the drops whose run is in flight; what is noted of those that have ended is taken away.

    :param sent: the drops whose event was sent and that no run has claimed.
    """
    unclaimed = {(marker.family, marker.id) for marker in sent}
    noted = frozenset(in_flight.entries(store))
    list(pool.map(lambda one: in_flight.enter(store, *one), unclaimed - noted))
    others = sorted(noted - unclaimed)
    owners = dict(zip(others, pool.map(lambda one: ledger.owner_of(store, *one), others), strict=True))
    going = ahead.going(sorted({owner for owner in owners.values() if owner}))

    def ended(one: tuple[str, str]) -> bool:
        if owners[one] is not None:
            return owners[one] not in going
        # If its marker is there, its event is still to be sent, or was sent by another intake at this moment.
        return store.stat(layout.pending_key(*one)) is None

    gone = {one for one, found in zip(others, pool.map(ended, others), strict=True) if found}
    list(pool.map(lambda one: in_flight.leave(store, *one), gone))
    return unclaimed | (noted - gone)


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


@dataclass(frozen=True)
class Ruled:
    """What a family's rules leave. :param markers: drops whose events may be sent. :param known: when that was decided.

    :param rules: of its file; None without.
    """

    family: str
    markers: Sequence[Marker]
    rules: IntakeRules | None = None
    known: Known = field(default_factory=Known)

    @property
    def limit(self) -> int | None:
        """How many of its runs may be in flight, if its file says so."""
        return None if self.rules is None else self.rules.max_active_runs


def _allowed(
    store: Store, markers: Sequence[Marker], rules: Rules, now: datetime, pool: ThreadPoolExecutor
) -> list[Ruled]:
    """The drops whose events may be sent, by the rules of their families."""
    families: dict[str, list[Marker]] = {}
    for marker in markers:
        families.setdefault(marker.family, []).append(marker)
    found: list[Ruled] = []
    for name, its in families.items():
        try:
            family = rules(name)
        except DropforgeError as error:
            # Whether there are rules nobody can tell, and a thousand runs cannot be taken back.
            log.error("Drops of family %s wait until its file is mended. %s", name, error)
            found.append(Ruled(name, [marker for marker in its if marker.nudged.times]))
            continue
        if family is None or family.intake is None:
            found.append(Ruled(name, its))
        else:
            found.append(_ruled(store, name, family, its, now, pool))
    return found


def _ruled(
    store: Store, name: str, family: Family, markers: Sequence[Marker], now: datetime, pool: ThreadPoolExecutor
) -> Ruled:
    assert family.intake is not None
    state = intake_ledger.read_state(store, name)
    by_id = {marker.id: marker for marker in _settled(store, name, markers, pool)}
    waiting = [intake_ledger.waiting(one, marker.note) for one, marker in by_id.items()]
    decided = decide(family.intake, waiting, state.known, now)
    # A turn of the rate is counted when the event is sent, which may be later.
    announced = [one.id for one in waiting if one.announced or one.id in state.known.announced]
    after = remember(family.intake, waiting, state.known, announced, now)
    until = None
    if by_id and len(decided.held) == len(by_id) and decided.until is not None:
        until = min(decided.until, now + _ASLEEP)
    # Before anything is done by it: who was faster has decided on the same drops.
    if not intake_ledger.write_state(store, name, state, State(after, until)):
        log.info("Another intake looks at family %s", name)
        return Ruled(name, ())
    for one, reason in decided.passed.items():
        if intake_ledger.supersede(store, name, one, str(by_id[one].note.get("drop", "")), reason):
            log.info("Drop %s/%s gets no run: %s", name, by_id[one].note.get("drop"), reason)
    for one, reason in decided.held.items():
        _hold(store, by_id[one], reason)
    made = [_gather(store, name, family, [one for one in waiting if one.id in ids]) for ids in decided.batches]
    if not any(made):
        return Ruled(name, [by_id[one] for one in decided.go], family.intake, after)
    # The batches wait now in the place of their drops, and take the turns that were free for them.
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
