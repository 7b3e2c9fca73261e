"""What the rules of intake of the families leave of the drops that wait."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from dropforge import intake_ledger, layout, ledger
from dropforge.drop import Drop
from dropforge.errors import DropforgeError
from dropforge.families import Family
from dropforge.intake_ledger import State
from dropforge.intake_rules import Intake, Known, Waiting, decide, remember
from dropforge.json_objects import UnreadableError
from dropforge.run_limits import run_limits
from dropforge.store import Store
from dropforge_airflow.tasks.markers import Marker, hold, read_markers

log = logging.getLogger(__name__)

Rules = Callable[[str], Family | None]
"""The file of a family; raises `DropforgeError` for one that is broken."""


@dataclass(frozen=True)
class Ruled:
    """What a family's rules leave. :param markers: drops whose events may be sent. :param known: when that was decided.

    :param rules: of its file; None without.
    """

    family: str
    markers: Sequence[Marker]
    rules: Intake | None = None
    known: Known = field(default_factory=Known)

    @property
    def limit(self) -> int | None:
        """How many of its runs may be in flight, if its file says so."""
        return None if self.rules is None else self.rules.max_active_runs


def by_rules(
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
            most = run_limits().bytes if family is not None and family.intake is not None else None
        except Exception as error:  # whatever its file does: the other families do not wait for it
            # Whether there are rules nobody can tell, and a thousand runs cannot be taken back.
            log.error("Drops of family %s wait until its file is fixed. %s", name, error)
            found.append(Ruled(name, [marker for marker in its if marker.nudged.times]))
            continue
        if family is None or family.intake is None:
            found.append(Ruled(name, its))
            continue
        try:
            found.append(_ruled(store, name, family, its, now, pool, most))
        except UnreadableError as error:  # what the ledger has of it: nor do the others wait for that
            log.error("Drops of family %s wait: %s", name, error)
            found.append(Ruled(name, ()))
    return found


def _ruled(
    store: Store,
    name: str,
    family: Family,
    markers: Sequence[Marker],
    now: datetime,
    pool: ThreadPoolExecutor,
    most_bytes: float | None,
) -> Ruled:
    assert family.intake is not None
    state = intake_ledger.read_state(store, name)
    by_id = {marker.id: marker for marker in _settled(store, name, markers, pool)}
    waiting = [intake_ledger.waiting(one, marker.note) for one, marker in by_id.items()]
    decided = decide(family.intake, waiting, state.known, now, most_bytes)
    # A turn of the rate is counted when the event is sent, which may be later.
    announced = [one.id for one in waiting if one.announced or one.id in state.known.announced]
    after = remember(family.intake, waiting, state.known, announced, now)
    until = None
    if by_id and len(decided.held) == len(by_id) and decided.until is not None:
        until = min(decided.until, now + intake_ledger.ASLEEP)
    # Before anything is done by it: who was faster has decided on the same drops.
    if not intake_ledger.write_state(store, name, state, State(after, until)):
        log.info("Another intake looks at family %s", name)
        return Ruled(name, ())
    for one, reason in decided.passed.items():
        if intake_ledger.supersede(store, name, one, str(by_id[one].note.get("drop", "")), reason):
            log.info("Drop %s/%s gets no run: %s", name, by_id[one].note.get("drop"), reason)
    for one, reason in decided.held.items():
        hold(store, by_id[one], reason)
    drops = {one.id: one for one in waiting}
    alone: list[str] = []
    made = [_gather(store, name, family, [drops[one] for one in ids], alone) for ids in decided.batches]
    if not any(made):
        return Ruled(name, [by_id[one] for one in (*decided.go, *alone)], family.intake, after)
    # The batches wait now in the place of their drops, and take the turns that were free for them.
    return _ruled(store, name, family, read_markers(store, f"{layout.PENDING}{name}/", pool), now, pool, most_bytes)


def _settled(store: Store, name: str, markers: Sequence[Marker], pool: ThreadPoolExecutor) -> list[Marker]:
    """The markers with an entry in the ledger, less the drops of batches, which an intake that was cut off left."""
    entries = store.sizes(layout.entries_prefix(name))
    known = [marker for marker in markers if layout.ledger_key(name, marker.id) in entries]
    known = list(pool.map(partial(_by_entry, store, _doubtful(known)), known))
    batches = [marker for marker in known if marker.note.get("batch")]
    gone: set[str] = set()
    for batch in pool.map(lambda marker: _entry(store, name, marker.id), batches):
        if batch is None:
            continue
        left = {part.id for part in batch.parts} & {marker.id for marker in known}
        if left:
            intake_ledger.leave(store, batch)
        gone |= left
    return [marker for marker in known if marker.id not in gone]


def _doubtful(markers: Sequence[Marker]) -> frozenset[str]:
    """Ids of drops whose markers are torn, or have one name, which two that came at once may have by chance."""
    names = Counter(_name(marker) for marker in markers)
    return frozenset(marker.id for marker in markers if not marker.note.get("drop") or names[_name(marker)] > 1)


def _name(marker: Marker) -> tuple[str, str]:
    return str(marker.note.get("bucket")), str(marker.note.get("drop"))


def _by_entry(store: Store, doubtful: Container[str], marker: Marker) -> Marker:
    """The marker as the entry of its drop has it, which is right where the two differ."""
    entry = _entry(store, marker.family, marker.id) if marker.id in doubtful else None
    if entry is None:
        return marker
    return replace(marker, note=intake_ledger.by_entry(store, entry, marker.note, marker.info.modified))


def _entry(store: Store, name: str, drop_id: str) -> Drop | None:
    """A drop as it was entered; None if that cannot be read, which is told where its event would be sent."""
    try:
        return ledger.read(store, name, drop_id)
    except UnreadableError:
        return None


def _gather(store: Store, name: str, family: Family, drops: Sequence[Waiting], alone: list[str]) -> bool:
    """Make one of several drops; two of what cannot be one, so that no drop holds the others. False if none was made.

    :param alone: gets the drops that cannot even be a batch by themselves: their own run says why.
    """
    recipe = {**family.overrides(), "extends": family.preset}
    try:
        batch = intake_ledger.gather(store, name, drops, recipe)
    except DropforgeError as error:
        log.error("Drops of family %s cannot become one run: %s", name, error)
    else:
        log.info("Drops %s of family %s become one run, as batch %s", [one.drop for one in drops], name, batch.id)
        return True
    if len(drops) == 1:
        alone.append(drops[0].id)
        return False
    half = len(drops) // 2
    made = [_gather(store, name, family, part, alone) for part in (drops[:half], drops[half:])]
    return any(made)
