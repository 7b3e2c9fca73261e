"""From the inbox to the ledger, and from the ledger to partition events.

Every step may be repeated: a message that is read twice, a drop that is entered twice and an event that is sent
twice change nothing, because the ledger in S3 decides.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from airflow.sdk.exceptions import AirflowRuntimeError

from dropforge import inbox, layout, ledger
from dropforge.drop import Drop, IncompleteError, partition_key, read_drop
from dropforge.errors import DropforgeError
from dropforge.layout import DropName
from dropforge.settings import from_env
from dropforge.store import MissingObjectError, ObjectInfo, Store
from dropforge_airflow import connection, events
from dropforge_airflow.backlog import Nudged, deserves_event

log = logging.getLogger(__name__)

# Of the task that claims, in runs that have begun. Not "null": a run that a person ended may keep such a task for ever.
_CLAIMING = ["scheduled", "queued", "running", "restarting", "up_for_retry"]

_AT_ONCE = 8  # drops; each takes some ten requests to S3, one after another
_OPEN = 10.0  # seconds in which what comes in meanwhile is taken along


@dataclass(frozen=True)
class Line:
    """What the fine-tune DAG has before it: whether it is paused, and how many of its runs have yet to claim a drop."""

    paused: bool = False
    unclaimed: int = 0


@dataclass
class Intake:
    """What one intake did."""

    entered: list[Drop] = field(default_factory=list)
    known: list[Drop] = field(default_factory=list)
    refused: dict[DropName, str] = field(default_factory=dict)
    waiting: dict[DropName, str] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        return {
            "entered": len(self.entered),
            "known": len(self.known),
            "refused": len(self.refused),
            "waiting": len(self.waiting),
            "announced": len(self.keys),
        }

    def summary(self) -> str:
        return ", ".join(f"{number} {word}" for word, number in self.counts().items())


def run_intake(ti: Any, finetune_dag: str) -> Intake:
    """The intake as a task: with the settings of the environment and Airflow's own view of the line.

    :param ti: the running task instance.
    """
    settings = from_env()

    def line() -> Line:
        try:
            paused = ti.get_dag(finetune_dag).is_paused
            # In this order a run that starts in between is counted twice, which costs one pause, and not missed.
            queued = ti.get_dr_count(finetune_dag, states=["queued"])
            return Line(paused, queued + ti.get_ti_count(finetune_dag, task_ids=["plan"], states=_CLAIMING))
        except AirflowRuntimeError as error:
            # A DAG that Airflow does not know (its file is broken, say) hears no event, as a paused one.
            log.warning("DAG %s cannot be asked: %s", finetune_dag, error)
            return Line(paused=True)

    patience = timedelta(minutes=settings.drop_patience)
    done = take_in(connection.open_store(settings.bucket), settings.bucket, settings.bucket_alias, line, patience)
    log.info("Intake: %s", done.summary())
    return done


def take_in(
    store: Store,
    bucket: str,
    bucket_alias: str,
    line: Callable[[], Line],
    patience: timedelta = timedelta(0),
) -> Intake:
    """Work through the inbox, then collect the partition keys whose events are to be sent.

    :param line: asked only when a drop waits.
    :param patience: how long a drop may wait for files that its `_SUCCESS` lists.
    """
    done = Intake()
    kept: set[str] = set()
    closes = time.monotonic() + _OPEN

    def work(entry: ObjectInfo) -> bool:
        names, at = _read_entry(store, entry.key, bucket)
        until = min(at, datetime.now(UTC)) + patience
        entered = [_enter(store, name, bucket, done, until) for name in names]
        if not all(entered):
            return False  # the trigger wakes for it again
        # Only now: a crash before this repeats the entry.
        store.delete(entry.key)
        return True

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Again while something is new, so that it need not wait for another run; but in a long burst those that are
        # entered must not wait for the last to come. What comes later has an event of its own.
        while entries := [entry for entry in store.list(layout.INBOX) if entry.key not in kept]:
            finished = list(pool.map(work, entries))
            kept |= {entry.key for entry, gone in zip(entries, finished, strict=True) if not gone}
            if time.monotonic() > closes:
                break
        done.keys = _events_to_send(store, bucket_alias, line, pool)
    return done


def _read_entry(store: Store, key: str, bucket: str) -> tuple[tuple[DropName, ...], datetime]:
    """The drops that an inbox entry tells of, and when it came."""
    nothing = (), datetime.now(UTC)
    try:
        entry = inbox.read(store.get(key))
        return events.finished_drops(events.read_message(entry.body), bucket), entry.at
    except MissingObjectError:
        return nothing  # another intake was faster
    except (ValueError, events.NotAnEventError) as error:
        log.error("Inbox entry %s cannot be read and is removed: %s", key, error)
        return nothing


def _enter(store: Store, name: DropName, bucket: str, done: Intake, until: datetime) -> bool:
    """Enter a finished drop, or refuse it; False if it waits for its files, which it may until then."""
    try:
        drop = read_drop(store, name.family, name.drop, bucket)
    except DropforgeError as error:
        if isinstance(error, IncompleteError) and datetime.now(UTC) < until:
            done.waiting[name] = str(error)
            log.info("Drop %s/%s waits until %s for its files: %s", *name, f"{until:%F %T} UTC", error.cause)
            return False
        record = {"reason": str(error), "thing": error.thing, "cause": error.cause, "mend": error.mend}
        record["at"] = datetime.now(UTC).isoformat()
        store.put(layout.refused_key(*name), json.dumps(record, indent=1, ensure_ascii=False).encode())
        done.refused[name] = str(error)
        log.warning("Drop %s/%s is refused for now. %s", *name, error)
        return True
    store.delete(layout.refused_key(*name))
    if ledger.record(store, drop):
        done.entered.append(drop)
        log.info("Drop %s/%s is entered: %d files, %d bytes, id %s", *name, len(drop.files), drop.total_bytes, drop.id)
    else:
        done.known.append(drop)
        log.info("Drop %s/%s holds the same bytes as one that was entered before (id %s)", *name, drop.id)
    return True


def _events_to_send(store: Store, bucket_alias: str, line: Callable[[], Line], pool: ThreadPoolExecutor) -> list[str]:
    waiting = list(store.list(layout.PENDING))
    if not waiting:
        return []
    ahead = line()
    if ahead.paused:
        # Airflow drops the events of a paused DAG; sending them would only raise the pauses between them.
        log.warning(
            "%d drops wait: the fine-tune DAG is paused. Once it runs, they start within a minute", len(waiting)
        )
        return []
    now = datetime.now(UTC)
    states = list(zip(waiting, pool.map(partial(_read_pending, store), waiting), strict=True))
    sent = sum(1 for _, state in states if state is not None and state.times)
    # As many runs have yet to claim as drops were announced: no event was lost, they only wait their turn.
    in_line = ahead.unclaimed >= sent
    due = [
        (info, state)
        for info, state in states
        if state is not None  # else claimed meanwhile
        and not (state.times and in_line)
        and deserves_event(state, now)
    ]
    return list(filter(None, pool.map(lambda one: _announce(store, one[0], one[1], now, bucket_alias), due)))


def _announce(store: Store, info: ObjectInfo, state: Nudged, now: datetime, bucket_alias: str) -> str | None:
    """The key to send for a waiting drop, noted in its marker; None if it was claimed meanwhile."""
    family, _, file = info.key.removeprefix(layout.PENDING).partition("/")
    try:
        drop = ledger.read(store, family, file.removesuffix(".json"))
    except MissingObjectError:
        return None  # its entry in the inbox, which is still there, will bring it again
    note = {"drop": drop.drop, "times": state.times + 1, "last": now.isoformat()}
    # Conditional, so that a claim which removes the marker at this moment is not undone.
    if not store.put_if_match(info.key, json.dumps(note).encode(), info.etag):
        return None
    if state.times:
        log.warning("Drop %s/%s has no run yet: its event is sent again", drop.family, drop.drop)
    return partition_key(bucket_alias, drop)


def _read_pending(store: Store, info: ObjectInfo) -> Nudged | None:
    try:
        values = json.loads(store.get(info.key))
        return Nudged(int(values.get("times", 0)), datetime.fromisoformat(values["last"]) if "last" in values else None)
    except MissingObjectError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return Nudged()  # an unreadable marker counts as never announced
