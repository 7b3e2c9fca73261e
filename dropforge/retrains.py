"""What the bucket knows of a family's retrains: which came to their end, and what the champion was made of."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from dropforge import layout, ledger
from dropforge.dataset import read_manifest
from dropforge.errors import DropforgeError
from dropforge.json_objects import UNREADABLE, UnreadableError, read_as, read_object, typed
from dropforge.retraining import Ended, Trained
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, Store

if TYPE_CHECKING:
    from dropforge.tracking import Champion

log = logging.getLogger(__name__)

_KEPT: Final = 50  # newest retrains that are read
_BASE: Final = ("model", "revision", "scratch")


def run_id(family: str, calendar_run: str) -> str:
    """The fine-tune run that a run of the calendar starts: always the same one, so that a second try finds it."""
    return f"retrain__{family}__{calendar_run}"[:240]


def begin(store: Store, family: str, run: str) -> None:
    """Note which fine-tune run the calendar starts now."""
    store.put(layout.retrain_key(family), json.dumps({"run": run}).encode())


def begun(store: Store, family: str) -> str | None:
    """The fine-tune run that the calendar started last."""
    try:
        return str(read_object(store, layout.retrain_key(family))["run"])
    except UNREADABLE:
        return None


def end(store: Store, family: str, ended: Ended) -> None:
    """Note a retrain that came to its end; told twice it stands there once."""
    name = hashlib.sha256(ended.run.encode()).hexdigest()[:32]
    store.put_if_absent(f"{layout.retrains_prefix(family)}{name}.json", json.dumps(asdict(ended), indent=1).encode())


def ended(store: Store, family: str) -> tuple[Ended, ...]:
    """The family's newest retrains that came to their end, the newest first; what cannot be read is none."""
    times = store.times(layout.retrains_prefix(family))
    found: list[Ended] = []
    for key in sorted(times, key=lambda key: times[key], reverse=True)[:_KEPT]:
        with suppress(MissingObjectError, UnreadableError):
            found.append(read_as(store, key, lambda values: typed(Ended(**values))))
    return tuple(found)


def trained(store: Store, family: str, champion: Champion) -> Trained:
    """What a champion was made of, as its version says, which no pod may change, and its run; of one from elsewhere
    nothing is known."""
    if not layout.is_run(champion.run):
        return Trained(champion.version, None, {})
    try:
        spec = RunSpec.read(store, layout.run_key(champion.run), champion.run_digest)
    except DropforgeError as error:
        log.warning("What the champion, version %s, began with is not known: %s", champion.version, error)
        return Trained(champion.version, _uploads(store, family, champion, None), {}, start=None)
    start = spec.start
    base: Mapping[str, Any] = spec.recipe.get("base") or {}
    if start is not None and start.kind != "base":
        base = start.origin  # whose revision nobody noted
    return Trained(
        version=champion.version,
        drops=_uploads(store, family, champion, spec),
        base={name: base[name] for name in _BASE if name in base},
        start=start.asked if start is not None else "base",
    )


def uploads(store: Store, family: str, drop_id: str) -> tuple[str, ...]:
    """Ids of the uploads that an entry of the ledger stands for: its parts, or itself."""
    try:
        parts = ledger.read(store, family, drop_id).parts
    except MissingObjectError:
        return (drop_id,)
    return tuple(part.id for part in parts) or (drop_id,)


def _uploads(store: Store, family: str, champion: Champion, spec: RunSpec | None) -> frozenset[str] | None:
    """Ids of the uploads that a champion has seen; None if nobody knows.

    :param spec: its run, for versions that an earlier release registered.
    """
    dataset = champion.dataset or (spec.dataset_digest if spec is not None else "")
    drop = champion.drop or (str(spec.drop.get("id", "")) if spec is not None else "")
    try:
        manifest = read_manifest(store, layout.manifest_key(family, dataset))
        entries = [step.drop for step in manifest.steps] or [drop]
        return frozenset(one for entry in entries for one in uploads(store, family, entry))
    except DropforgeError:
        return None
