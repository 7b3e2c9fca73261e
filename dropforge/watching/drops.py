"""What the ledger says of drops, from listings alone: no object is read, so it costs one request per thousand drops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dropforge import layout
from dropforge.store import Store


@dataclass(frozen=True)
class Drops:
    """The drops of one family.

    :param taken: those that a run or a batch has. :param superseded: those that get no run because of a newer one.
    :param oldest: since when the one waits that waits longest, in seconds since 1970; None if none does.
    :param waits: for each that was taken, how many seconds it had waited.
    """

    waiting: int = 0
    taken: int = 0
    superseded: int = 0
    refused: int = 0
    oldest: float | None = None
    waits: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """:param inbox: messages that intake has not worked through. :param dead: those in the bucket that are no event."""

    families: Mapping[str, Drops] = field(default_factory=dict)
    inbox: int = 0
    dead: int = 0


def read_ledger(store: Store) -> Ledger:
    """The ledger as it is now."""
    # Claims first: a drop that is taken meanwhile is then seen twice, as waiting, and never not at all.
    claimed = _first_claims(store.times(layout.CLAIMS))
    superseded = _by_family(store.times(layout.SUPERSEDED), layout.SUPERSEDED)
    waiting = _by_family(store.times(layout.PENDING), layout.PENDING)
    entered = _by_family(store.times(layout.ENTRIES), layout.ENTRIES)
    refused = _by_family(store.times(layout.REFUSED), layout.REFUSED)
    found = {}
    for family in sorted({*claimed, *superseded, *waiting, *entered, *refused}):
        without = superseded.get(family, {}).keys()
        # A crash between claim and marker leaves both; whoever has the claim has the drop.
        taken = {drop: when for drop, when in claimed.get(family, {}).items() if drop not in without}
        there = entered.get(family, {})
        free = {
            drop: when for drop, when in waiting.get(family, {}).items() if drop not in taken and drop not in without
        }
        found[family] = Drops(
            waiting=len(free),
            taken=len(taken),
            superseded=len(without),
            refused=len(refused.get(family, {})),
            oldest=min(free.values(), default=None),
            waits=tuple(max(0.0, when - there[drop]) for drop, when in taken.items() if drop in there),
        )
    return Ledger(found, inbox=len(store.sizes(layout.INBOX)), dead=len(store.sizes(layout.MESSAGES)))


def _by_family(times: Mapping[str, float], prefix: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for key, when in times.items():
        family, _, name = key.removeprefix(prefix).partition("/")
        if name.endswith(".json"):
            found[family][name.removesuffix(".json")] = when
    return dict(found)


def _first_claims(times: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """When each drop was taken for the first time; later claims are forced re-runs, which waited for nothing."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for key, when in times.items():
        family, _, rest = key.removeprefix(layout.CLAIMS).partition("/")
        drop, _, name = rest.partition("/")
        if name == "1.json":
            found[family][drop] = when
    return dict(found)
