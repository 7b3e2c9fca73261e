"""From the inbox to the ledger, and from the ledger to partition events.

Every step may be repeated: a message that is read twice, a drop that is entered twice and an event that is sent
twice change nothing, because the ledger in S3 decides.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from airflow.sdk.exceptions import AirflowRuntimeError

from dropforge import inbox, layout, ledger
from dropforge.drop import Drop, IncompleteError, UnfinishedError, elsewhere, read_drop
from dropforge.errors import DropforgeError
from dropforge.fair_share import slots_of
from dropforge.families import rules_of
from dropforge.layout import DropName
from dropforge.settings import from_env
from dropforge.store import MissingObjectError, Store, TooLargeError, out_of_reach, read_bounded
from dropforge_airflow import connection, events
from dropforge_airflow.alerts import texts
from dropforge_airflow.alerts.telling import tell
from dropforge_airflow.dag_runs import ACTIVE, going
from dropforge_airflow.tasks.announce import Line, events_to_send
from dropforge_airflow.tasks.ruled import Rules

log = logging.getLogger(__name__)

# Of the task that claims, in runs that have begun. Not "null": a run that a person ended may keep such a task for ever.
_CLAIMING = ["scheduled", "queued", "running", "restarting", "up_for_retry"]

_AT_ONCE = 8  # drops; each takes some ten requests to S3, one after another
_OPEN = 10.0  # seconds in which what comes in meanwhile is taken along
# Seconds after which no further drop is looked at: those that are entered must not wait for a family with very many.
_LONGEST = 60.0


class Place(NamedTuple):
    """A bucket that drops come from. :param alias: its name in partition keys. :param store: the bucket itself."""

    alias: str
    store: Store


class FinishedDrop(NamedTuple):
    """A finished drop of which an entry of the inbox tells. :param at: when that came. :param entry: its key."""

    bucket: str
    name: DropName
    at: datetime
    entry: str


@dataclass
class Intake:
    """What one intake did.

    :param gone: drops without a `_SUCCESS`, whatever their message says.
    :param failed: what befell entries that stay in the inbox, and are worked through again: no fault of their drops.
    """

    entered: list[Drop] = field(default_factory=list)
    known: list[Drop] = field(default_factory=list)
    refused: dict[DropName, str] = field(default_factory=dict)
    waiting: dict[DropName, str] = field(default_factory=dict)
    gone: list[DropName] = field(default_factory=list)
    failed: list[Exception] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        return {
            "entered": len(self.entered),
            "known": len(self.known),
            "refused": len(self.refused),
            "waiting": len(self.waiting),
            "gone": len(self.gone),
            "failed": len(self.failed),
            "announced": len(self.keys),
        }

    def summary(self) -> str:
        return ", ".join(f"{number} {word}" for word, number in self.counts().items())


def run_intake(ti: Any, finetune_dag: str, families: Path) -> Intake:
    """The intake as a task: with the settings of the environment and Airflow's own view of the line.

    :param ti: the running task instance. :param families: folder of the families' files.
    :raises Exception: of an entry that failed, if there is no event to send: those of a task that fails are lost, and
        what stays in the inbox wakes intake again.
    """
    from airflow.sdk.configuration import conf

    settings = from_env()

    def line() -> Line:
        try:
            paused = ti.get_dag(finetune_dag).is_paused
            # In this order a run that starts in between is counted twice, which costs one pause, and not missed.
            queued = ti.get_dr_count(finetune_dag, states=["queued"])
            unclaimed = queued + ti.get_ti_count(finetune_dag, task_ids=["plan"], states=_CLAIMING)
            active = ti.get_dr_count(finetune_dag, states=ACTIVE)
        except AirflowRuntimeError as error:
            # A DAG that Airflow does not know (its file is broken, say) hears no event, as a paused one.
            log.warning("DAG %s cannot be asked: %s", finetune_dag, error)
            return Line(paused=True)
        slots = slots_of(conf.getint("core", "max_active_runs_per_dag", fallback=16))
        return Line(paused, unclaimed, active, partial(going, ti, finetune_dag), slots)

    patience = timedelta(minutes=settings.drop_patience)
    done = take_in(
        connection.open_store(settings.bucket),
        settings.bucket,
        settings.bucket_alias,
        line,
        patience,
        partial(rules_of, families),
        {bucket: Place(alias, connection.open_store(bucket)) for bucket, alias in settings.drop_buckets.items()},
        _tell_refused,
    )
    log.info("Intake: %s", done.summary())
    if done.failed and not done.keys:
        raise done.failed[0]
    return done


def _tell_refused(name: DropName, entry: str, error: DropforgeError) -> None:
    tell(texts.rejected(name.family, name.drop, entry, f"{error.thing}: {error.cause}", error.mend))


def take_in(
    store: Store,
    bucket: str,
    bucket_alias: str,
    line: Callable[[], Line],
    patience: timedelta = timedelta(0),
    rules: Rules = lambda _: None,
    others: Mapping[str, Place] = MappingProxyType({}),
    on_refusal: Callable[[DropName, str, DropforgeError], None] = lambda *_: None,
) -> Intake:
    """Work through the inbox, then collect the partition keys whose events are to be sent.

    :param line: asked only when a drop waits.
    :param patience: how long a drop may wait for files that its `_SUCCESS` lists.
    :param rules: of intake, by family. :param others: buckets that drops come from besides that of the ledger.
    :param on_refusal: told of a drop that is refused, the key of the entry that named it, and why.
    """
    done = Intake()
    attempt = partial(_attempt, done)
    places = {bucket: Place(bucket_alias, store), **others}
    kept: set[str] = set()
    told: dict[str, tuple[FinishedDrop, ...]] = {}  # by the entries that could be read
    last_entry = cache(partial(ledger.last_entry, store))  # a family has many, and a burst many drops
    later: list[FinishedDrop] = []
    began = time.monotonic()

    def look(one: FinishedDrop) -> bool:
        if time.monotonic() - began > _LONGEST:
            later.append(one)  # the trigger wakes for it again
            return False
        until = min(one.at, datetime.now(UTC)) + patience
        tell_of_it = partial(on_refusal, one.name, one.entry)
        enter = partial(_enter, store, one.name, one.bucket, places[one.bucket], done, until, tell_of_it, last_entry)
        return attempt(one.entry, enter)

    def read(entry: str) -> None:
        attempt(entry, lambda: told.update({entry: _read_entry(store, entry, places)}))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Again while something is new, so that it need not wait for another run; but in a long burst those that are
        # entered must not wait for the last to come. What comes later has an event of its own.
        while entries := [entry.key for entry in store.list(layout.INBOX) if entry.key not in kept]:
            told.clear()
            list(pool.map(read, entries))
            drops = in_turn([one for found in told.values() for one in found])
            over = {_drop(one) for one, is_over in zip(drops, pool.map(look, drops), strict=True) if is_over}
            # Only now: a crash before this repeats the entry.
            ready = [entry for entry, found in told.items() if over.issuperset(map(_drop, found))]
            gone = pool.map(lambda entry: attempt(entry, partial(store.delete, entry)), ready)
            kept |= set(entries) - {entry for entry, is_gone in zip(ready, gone, strict=True) if is_gone}
            if time.monotonic() - began > _OPEN:
                break
        if later:
            log.warning("%d drops are left to the next intake: this one has taken more than %g s", len(later), _LONGEST)
        done.keys = events_to_send(
            store, {its_bucket: place.alias for its_bucket, place in places.items()}, line, rules, pool
        )
    return done


def _attempt(done: Intake, entry: str, step: Callable[[], object]) -> bool:
    """Whether a step of an entry is done; one that fails holds up no other entry, and no event is lost for it."""
    try:
        return step() is not False
    except Exception as error:
        done.failed.append(error)
        log.exception("Inbox entry %s could not be worked through and stays", entry)
        return False


def in_turn(found: Sequence[FinishedDrop]) -> list[FinishedDrop]:
    """Each drop once, however many entries tell of it: by the newest of them; one of each family, then the next."""
    drops: dict[tuple[str, DropName], FinishedDrop] = {}
    for one in sorted(found, key=lambda one: one.at):
        drops[_drop(one)] = one
    before: Counter[str] = Counter()
    turns = []
    for one in drops.values():
        turns.append((before[one.name.family], one))
        before[one.name.family] += 1
    return [one for _, one in sorted(turns, key=lambda turn: turn[0])]


def _drop(one: FinishedDrop) -> tuple[str, DropName]:
    return one.bucket, one.name


#: Of an entry: a message of the queue has 1 MiB, which JSON may write six times as long.
_ENTRY_BYTES: Final = 8 << 20


def _read_entry(store: Store, key: str, places: Mapping[str, Place]) -> tuple[FinishedDrop, ...]:
    """The drops that an inbox entry tells of."""
    try:
        entry = inbox.read(read_bounded(store, key, _ENTRY_BYTES))
        drops = events.finished_drops(events.read_message(entry.body), places)
        return tuple(FinishedDrop(bucket, name, entry.at, key) for bucket, name in drops)
    except MissingObjectError:
        return ()  # another intake was faster
    except (TooLargeError, ValueError, RecursionError, events.NotAnEventError) as error:
        log.error("Inbox entry %s cannot be read and is removed: %s", key, error)
        return ()


def _unexpected(name: DropName, error: Exception) -> DropforgeError:
    """An error that nobody foresaw, as one of its drop: it must not come again and again before all others."""
    log.error("Drop %s/%s cannot be looked at", *name, exc_info=error)
    cause = f"it cannot be looked at ({type(error).__name__}: {error})"
    mend = f"The log of intake has the whole error. Upload {layout.SUCCESS} again once its cause is fixed"
    return DropforgeError(f"drop {name.family}/{name.drop}", cause, mend)


def _enter(
    store: Store,
    name: DropName,
    bucket: str,
    place: Place,
    done: Intake,
    until: datetime,
    on_refusal: Callable[[DropforgeError], None],
    last_entry: Callable[[str], float],
) -> bool:
    """Enter a finished drop, or refuse it, whatever is wrong with it; False if it waits for its files until then.

    Of one that has no `_SUCCESS` nothing is kept, and an earlier letter stays: it may be about the upload that is gone.

    :raises Exception: if the store is out of reach, which is no fault of the drop.
    """
    away = place.store is not store
    refused = layout.refused_key(*name, place.alias if away else "")
    try:
        drop = read_drop(place.store, name.family, name.drop, bucket, suggest=False)
        if away:
            drop = drop.model_copy(update={"root": elsewhere(bucket, *name)})
    except UnfinishedError:
        # Events only wake: whoever sends thousands of drops that nobody uploaded makes no letter and no alert.
        done.gone.append(name)
        log.info("Drop %s/%s has no %s (any more): there is nothing to enter", *name, layout.SUCCESS)
        return True
    except Exception as raised:
        if out_of_reach(raised):
            raise
        error = raised if isinstance(raised, DropforgeError) else _unexpected(name, raised)
        if isinstance(error, IncompleteError) and datetime.now(UTC) < until:
            done.waiting[name] = str(error)
            log.info("Drop %s/%s waits until %s for its files: %s", *name, f"{until:%F %T} UTC", error.cause)
            return False
        record = {"reason": str(error), "thing": error.thing, "cause": error.cause, "mend": error.mend}
        record |= {"at": datetime.now(UTC).isoformat(), "bucket": bucket}
        store.put(refused, json.dumps(record, indent=1, ensure_ascii=False).encode())
        done.refused[name] = str(error)
        log.warning("Drop %s/%s is refused for now. %s", *name, error)
        on_refusal(error)
        return True
    store.delete(refused)
    drop = ledger.in_order(drop, last_entry(name.family), time.time())
    entered = ledger.record(store, drop)
    if entered is not None:
        done.entered.append(entered)
        told = len(drop.files), drop.total_bytes, entered.id
        log.info("Drop %s/%s is entered: %d files, %d bytes, id %s", *name, *told)
    else:
        done.known.append(drop)
        log.info("Drop %s/%s holds the same bytes as one that was entered before (id %s)", *name, drop.id)
    return True
