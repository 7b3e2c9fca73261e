"""Whether a family is retrained now, and on what: a pure function of what is there.

A retrain is worth its cost if the drops that it would take, or the base that it would begin with, are not those of the
champion; and not if the same was tried already and lost. A person's force overrules both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dropforge.families import Alert, Family

_NAMED: Final = 5  # drops in a sentence
_AVERAGED: Final = 10  # newest retrains


@dataclass(frozen=True)
class Arrival:
    """An uploaded drop."""

    drop: str
    id: str


@dataclass(frozen=True)
class Trained:
    """What the champion was made of.

    :param drops: ids of the uploads that it has seen; None if nobody knows.
    :param base: `model`, `revision` and `scratch` of its base, as far as they are known.
    :param start: what its recipe said under `base.start`; None if nobody knows.
    """

    version: str
    drops: frozenset[str] | None
    base: Mapping[str, Any]
    start: str | None = "base"


@dataclass(frozen=True)
class Ended:
    """A retrain that came to its end: a model was made and judged.

    :param work: digest of what it was to train, see `work`. :param seconds: from the decision to the end.
    """

    run: str
    work: str
    seconds: float
    at: str


@dataclass(frozen=True)
class There:
    """What there is when the calendar looks.

    :param drops: the family's uploads in the order of their arrival. :param champion: None if there is none.
    :param base: `model`, `revision` and `scratch` of the family's recipe, the revision pinned.
    :param running: the fine-tune run that the calendar started before, if it has not ended.
    :param ended: the family's retrains, the newest first.
    :param recipe: the resolved recipe as plain values.
    """

    drops: Sequence[Arrival]
    champion: Trained | None
    base: Mapping[str, Any]
    recipe: Mapping[str, Any]
    running: str | None = None
    ended: Sequence[Ended] = ()


@dataclass(frozen=True)
class Retrain:
    """Train on these drops. :param work: digest of what is to be trained."""

    reason: str
    drops: tuple[Arrival, ...]
    work: str


@dataclass(frozen=True)
class Skip:
    """Train nothing."""

    reason: str


def decide(family: Family, there: There, *, force: bool = False) -> Retrain | Skip:
    """What the calendar does now. :param force: a person asks for it whatever changed."""
    if there.running is not None:
        return Skip(f"the retrain {there.running} of the family has not ended")
    if not there.drops:
        return Skip("the family has no drop yet")
    taken = choose(family, there)
    if not taken:
        version = there.champion.version if there.champion else "none"
        more = "; `data: all` or `last N drops` would take older ones" if force else ""
        return Skip(f"no drop arrived since those of the champion, version {version}{more}")
    task = work(family, there, taken)
    why = changed(family, there, taken)
    if force:
        return Retrain(f"forced; {why or 'nothing changed since the champion'}", taken, task)
    if not why:
        version = there.champion.version if there.champion else "none"
        what = f"the champion, version {version}, knows {_named(taken)}"
        return Skip(f"nothing changed: {what}, and its {_start(family)} is the same")
    if (before := next((one for one in there.ended if one.work == task), None)) is not None:
        return Skip(f"the same was trained by {before.run} until {before.at}, and is not the champion; {why}")
    return Retrain(why, taken, task)


def choose(family: Family, there: There) -> tuple[Arrival, ...]:
    """The drops that a retrain takes by the family's `data`, in the order of their arrival."""
    drops = tuple(there.drops)
    if family.last is not None:
        return drops[-family.last :]
    if family.data == "all" or there.champion is None or there.champion.drops is None:
        return drops
    seen = [number for number, drop in enumerate(drops) if drop.id in there.champion.drops]
    return drops[seen[-1] + 1 :] if seen else drops


def changed(family: Family, there: There, taken: Sequence[Arrival]) -> str:
    """What is other than the champion's, in a sentence; empty if nothing is."""
    champion = there.champion
    if champion is None:
        return f"the family has no champion yet; {_named(taken)}"
    if champion.drops is None:
        return f"it is not known which drops the champion, version {champion.version}, was trained on"
    reasons = []
    if new := [drop for drop in taken if drop.id not in champion.drops]:
        reasons.append(f"the champion, version {champion.version}, does not know {_named(new)}")
    if family.start != "champion":
        reasons += _base(family, there, champion)
    return "; ".join(reasons)


def _base(family: Family, there: There, champion: Trained) -> list[str]:
    if champion.start not in {None, "champion", family.start}:
        return [f"the champion began with `{champion.start}`, the family begins with `{family.start}`"]
    if family.start != "base":
        return []
    for name, known in champion.base.items():
        if _given(known) != _given(there.base.get(name)):
            return [f"the base changed: `{name}` was {_text(known)} and is {_text(there.base.get(name))}"]
    return []


def work(family: Family, there: There, taken: Sequence[Arrival]) -> str:
    """Digest of what a retrain would train: drops, recipe, base, and of a champion that it begins with the version."""
    begins = there.champion.version if family.start == "champion" and there.champion else family.start
    what = [sorted(drop.id for drop in taken), there.recipe, dict(there.base), begins]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def limit(alert: Alert, ended: Sequence[Ended]) -> tuple[float | None, str]:
    """How long a retrain may take (seconds) before somebody is told, and why so long; None with too few to compare.

    :param ended: retrains that came to their end, the newest first: skips and failures are none.
    """
    runs = ended[:_AVERAGED]
    if len(runs) < alert.after_runs:
        have = "no retrain has" if not runs else f"{len(runs)} of the family's retrains have"
        return None, f"{have} come to an end yet, and an average takes {alert.after_runs}"
    average = sum(one.seconds for one in runs) / len(runs)
    longest = alert.times * average
    told = f"{alert.times:g} times the average of {len(runs)} retrains, {average:.0f} s"
    return longest, f"it may take {longest:.0f} s, which is {told}"


def _start(family: Family) -> str:
    return "base" if family.start == "base" else "start"


def _named(drops: Sequence[Arrival]) -> str:
    names = ", ".join(drop.drop for drop in drops[-_NAMED:])
    if len(drops) == 1:
        return f"drop {names}"
    return f"{len(drops)} drops{f', the last being {names}' if len(drops) > _NAMED else f': {names}'}"


def _given(value: Any) -> Any:
    """A value without the keys that are not given: a recipe of an earlier version has fewer of them."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value


def _text(value: Any) -> str:
    return json.dumps(_given(value), sort_keys=True)[:200]
