"""From the drops that wait to the partition events that are to be sent, by their families' rules of intake."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dropforge import fair_share, in_flight, intake_ledger, layout, ledger
from dropforge.drop import partition_key
from dropforge.fair_share import FamilyLoad, RunSlots
from dropforge.intake_ledger import State
from dropforge.intake_rules import Waiting, remember
from dropforge.json_objects import UnreadableError
from dropforge.store import MissingObjectError, Store
from dropforge_airflow.backlog import deserves_event
from dropforge_airflow.tasks.markers import Marker, hold, read_markers
from dropforge_airflow.tasks.ruled import Ruled, Rules, by_rules

log = logging.getLogger(__name__)

_WAITS: Final = ""  # in the place of a run that has the drop


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
    waiting = read_markers(store, layout.PENDING, pool)
    sent = [marker for marker in waiting if marker.nudged.times]
    # As many runs have yet to claim as drops were announced: no event was lost, they only wait their turn.
    in_line = ahead.unclaimed >= len(sent)
    ruled = by_rules(store, waiting, rules, now, pool)
    again = [marker for one in ruled for marker in one.markers if marker.nudged.times and not in_line]
    due = [marker for marker in again if deserves_event(marker.nudged, now)]
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
        shared = fair_share.share(loads, slots, taken, now)
        there = pool.map(lambda one: store.stat(layout.ledger_key(*one)) is not None, shared.go)
        # A marker whose drop is not in the ledger yet takes nobody's place: its entry in the inbox brings it again.
        if not (without := [one for one, found in zip(shared.go, there, strict=True) if not found]):
            break
        for one in without:
            del by_id[one]
    list(pool.map(lambda one: hold(store, by_id[one[0]], one[1]), shared.held.items()))
    refused = {one.family for one in ruled if not _turns_taken(store, one, shared.go, now)}
    return begun + [by_id[one] for one in shared.go if one[0] not in refused]


def _turns_taken(store: Store, one: Ruled, go: Sequence[tuple[str, str]], now: datetime) -> bool:
    """Count the turns of a family's rate for what goes; False if another intake has changed what was counted."""
    if one.rules is None or one.rules.limit is None:
        return True
    ids = [drop_id for family, drop_id in go if family == one.family]
    if not ids:
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

    def owner(one: tuple[str, str]) -> str | None:
        # First the marker: with it the event is still to be sent, or was by another intake at this moment.
        waits = store.stat(layout.pending_key(*one)) is not None
        try:
            return _WAITS if waits else ledger.owner_of(store, *one)
        except UnreadableError as error:
            log.error("A drop of family %s stays in flight: %s", one[0], error)
            return _WAITS

    others = sorted(noted - unclaimed)
    owners = dict(zip(others, pool.map(owner, others), strict=True))
    going = ahead.going(sorted({run for run in owners.values() if run and run != _WAITS})) | {_WAITS}
    gone = {one for one, run in owners.items() if run not in going}
    list(pool.map(lambda one: in_flight.leave(store, *one), gone))
    return unclaimed | (noted - gone)


def _announce(store: Store, marker: Marker, now: datetime, aliases: Mapping[str, str]) -> str | None:
    """The key to send for a waiting drop, noted in its marker; None if it was claimed meanwhile, or cannot be read."""
    try:
        drop = ledger.read(store, marker.family, marker.id)
    except MissingObjectError:
        return None  # its entry in the inbox, which is still there, will bring it again
    except UnreadableError as error:
        log.error("A drop of family %s gets no run: %s", marker.family, error)
        return None
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
