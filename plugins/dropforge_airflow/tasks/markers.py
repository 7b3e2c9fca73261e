"""The markers of drops that wait for a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from dropforge import layout
from dropforge.json_objects import UnreadableError, read_object
from dropforge.store import MissingObjectError, ObjectInfo, Store
from dropforge_airflow.backlog import Nudged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Marker:
    """A drop that waits for a run. :param note: what its object says."""

    info: ObjectInfo
    note: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return layout.family_and_id(layout.PENDING, self.info.key)[0]

    @property
    def id(self) -> str:
        return layout.family_and_id(layout.PENDING, self.info.key)[1]

    @property
    def nudged(self) -> Nudged:
        try:
            times, last = int(self.note.get("times", 0)), self.note.get("last")
            return Nudged(times, datetime.fromisoformat(last) if last is not None else None)
        except (ValueError, TypeError, OverflowError):
            return Nudged()  # an unreadable marker counts as never announced


def read_markers(store: Store, prefix: str, pool: ThreadPoolExecutor) -> list[Marker]:
    return list(filter(None, pool.map(partial(_read, store), store.list(prefix))))


def _read(store: Store, info: ObjectInfo) -> Marker | None:
    """A marker; None if its drop was claimed meanwhile."""
    try:
        return Marker(info, read_object(store, info.key))
    except MissingObjectError:
        return None
    except UnreadableError:
        return Marker(info, {})


def hold(store: Store, marker: Marker, reason: str) -> None:
    """Say in the marker why its drop waits."""
    if marker.note.get("held") != reason:
        note = {**marker.note, "held": reason}
        if store.put_if_match(marker.info.key, json.dumps(note).encode(), marker.info.etag):
            log.info("Drop %s/%s waits: %s", marker.family, marker.note.get("drop"), reason)
