"""The ledger of a family for its page: which drops came, which wait or were refused, and which runs took them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from dropforge import layout, ledger
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.json_objects import find_object, read_object
from dropforge.store import MissingObjectError, Store, read_bounded

SHOWN: Final = 30  # of a family's drops, the newest
_MOST_KEYS: Final = 5000
_MOST_FAMILIES: Final = 500
_AT_ONCE: Final = 8  # requests
_MOST_CLAIMS: Final = 5  # of one drop, the newest
_LARGEST: Final = 2 << 20  # bytes of an entry that is read; one with a hundred thousand files is named by its id alone
_LARGEST_CARD: Final = 16 << 20  # bytes


@dataclass(frozen=True)
class Entered:
    """A drop in the ledger.

    :param name: of the upload, or where a recipe found the data; empty if the entry is too large to read here.
    :param entered: seconds since 1970. :param takers: runs of the fine-tune DAG that claimed it, or the batch that it
        is part of, the newest first. :param why: it waits, or gets no run, by its family's rules of intake.
    """

    id: str
    name: str
    entered: float
    files: int
    bytes: int
    waits: bool
    takers: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Refused:
    """A drop that could not be entered, and why."""

    name: str
    since: float
    why: str


@dataclass(frozen=True)
class Ledger:
    """:param more: how many older drops are not shown. :param whole: False if there are too many to list."""

    entered: tuple[Entered, ...]
    refused: tuple[Refused, ...]
    more: int
    whole: bool


def families(store: Store) -> list[str]:
    """Families of which there is a drop, entered or refused."""
    places = (layout.ENTRIES, layout.REFUSED)
    found = {name for place in places for name in store.folders(place, _MOST_FAMILIES)}
    return sorted(name for name in found if _is_family(name))


def read(store: Store, family: str) -> Ledger:
    """The newest drops of a family."""
    times = store.times(layout.entries_prefix(family), _MOST_KEYS)
    newest = sorted(times.items(), key=lambda item: item[1], reverse=True)
    refused = store.times(f"{layout.REFUSED}{family}/", SHOWN)
    with ThreadPoolExecutor(_AT_ONCE, "dropforge-ledger") as pool:
        entered = tuple(pool.map(lambda item: _entered(store, family, *item), newest[:SHOWN]))
        told = tuple(pool.map(lambda item: _refused(store, *item), refused.items()))
    return Ledger(
        entered,
        told,
        len(times) - len(entered),
        len(times) < _MOST_KEYS,
    )


def card(store: Store, family: str, digest: str) -> bytes | None:
    """The page that shows a dataset version, or None if there is none."""
    try:
        files = read_object(store, layout.manifest_key(family, digest)).get("files")
        key = files.get("card_html") if isinstance(files, dict) else None
        if not isinstance(key, str) or not key.startswith(f"{layout.dataset_prefix(family, digest)}card"):
            return None  # a manifest that names anything else is none of ours
        return read_bounded(store, key, _LARGEST_CARD)
    except MissingObjectError:
        return None


def _entered(store: Store, family: str, key: str, when: float) -> Entered:
    drop_id = key.rpartition("/")[2].removesuffix(".json")
    drop = _drop(store, key)
    claims = store.times(layout.claims_prefix(family, drop_id), 1000)
    newest = sorted(claims, key=lambda name: claims[name], reverse=True)[:_MOST_CLAIMS]
    found = [find_object(store, name, most=_LARGEST) for name in newest]
    takers = tuple(run for claim in found if claim.get("owner") and (run := ledger.run_of(store, family, claim)))
    waits = not found and store.stat(layout.pending_key(family, drop_id)) is not None
    passed = next((str(claim["because"]) for claim in found if claim.get("because")), None)
    return Entered(
        id=drop_id,
        name=(drop.root or drop.drop) if drop else "",
        entered=when,
        files=len(drop.data_files) if drop else 0,
        bytes=drop.total_bytes if drop else 0,
        waits=waits,
        takers=takers,
        why=passed or (ledger.held(store, family, drop_id) if waits else None) or "",
    )


def _drop(store: Store, key: str) -> Drop | None:
    info = store.stat(key)
    if info is None or info.size > _LARGEST:
        return None
    try:
        return ledger.read_entry(store, key)
    except (MissingObjectError, ValueError):
        return None


def _refused(store: Store, key: str, when: float) -> Refused:
    told = find_object(store, key, most=_LARGEST)
    return Refused(key.rpartition("/")[2].removesuffix(".json"), when, str(told.get("reason") or ""))


def _is_family(name: str) -> bool:
    try:
        return bool(layout.check_family(name))
    except DataError:
        return False
