"""A family's rules of intake: how often a drop is announced, which drops become one run, which are passed over.

Pure: what waits, what was announced and the time go in, and what is to be done comes out. It may be asked again at any
moment, and what is done half is done whole by the next look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import Field, field_validator

from dropforge.drop import MAX_FILES
from dropforge.errors import RecipeError
from dropforge.section import Section

BATCH: Final = 1000  # drops that `data.source.drops` reads as one
# By which clocks of machines differ. What was noted later than that was noted before the clock was set back: nothing
# waits for it, and what came since is newer.
_SKEW: Final = timedelta(minutes=5)
_UNITS: Final = {
    "minute": timedelta(minutes=1),
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(weeks=1),
}
_RATE: Final = re.compile(r"([1-9][0-9]{0,2}) per (?:([1-9][0-9]{0,2}) )?(minute|hour|day|week)s?")
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3}) (minute|hour|day)s?")


class Intake(Section):
    """What becomes of the family's drops before they have a run; at least one key."""

    rate: str | None = None
    """So many runs are announced at most, as `4 per day` or `1 per 30 minutes`; the others wait their turn."""
    window: str | None = None
    """Drops that come within it, from the first on, become one run over all of them, as `30 minutes`."""
    latest_only: bool = False
    """A drop that no run has taken when a newer one comes is skipped, and recorded in the ledger."""
    max_active_runs: int | None = Field(default=None, ge=1, le=1000)
    """So many runs of its drops are in flight at most; `DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY` else."""

    @field_validator("rate")
    @classmethod
    def _is_rate(cls, rate: str | None) -> str | None:
        if rate is not None and not _RATE.fullmatch(rate):
            raise ValueError("it is no rate as `4 per day` or `1 per 30 minutes`")
        return rate

    @field_validator("window")
    @classmethod
    def _is_time(cls, window: str | None) -> str | None:
        if window is not None and not _WINDOW.fullmatch(window):
            raise ValueError("it is no time as `30 minutes`, `2 hours` or `1 day`")
        return window

    @property
    def limit(self) -> tuple[int, timedelta] | None:
        """How many in which time."""
        found = _RATE.fullmatch(self.rate) if self.rate else None
        return (int(found[1]), int(found[2] or 1) * _UNITS[found[3]]) if found else None

    @property
    def gathers(self) -> timedelta | None:
        """How long drops are gathered."""
        found = _WINDOW.fullmatch(self.window) if self.window else None
        return int(found[1]) * _UNITS[found[2]] if found else None


def check_rules(rules: Intake) -> None:
    """:raises RecipeError: for rules that cannot work together."""
    if not (rules.rate or rules.window or rules.latest_only or rules.max_active_runs):
        mend = "Give `rate`, `window`, `latest_only: true` or `max_active_runs`"
        raise RecipeError("key `intake`", "it says nothing", mend)
    if rules.window is not None and rules.latest_only:
        raise RecipeError(
            "key `intake.latest_only`",
            "it takes one drop alone, and `window` puts them together",
            "Leave one out; `latest_only` with a `rate` takes the newest each time",
        )


@dataclass(frozen=True)
class Waiting:
    """An entry of the ledger that no run has taken.

    :param at: when it was entered. :param completed: when its `_SUCCESS` was written, Unix time.
    :param place: its bucket. :param announced: its event was sent. :param batch: it is several drops already.
    :param group: of those that wait again since their batch was refused; they become one without a window.
    :param size: its bytes, 0 if its marker does not say. :param files: likewise.
    """

    id: str
    drop: str
    at: datetime
    completed: float = 0.0
    place: str = ""
    announced: bool = False
    batch: bool = False
    group: str = ""
    size: float = 0.0
    files: float = 0.0

    def age(self, now: datetime) -> tuple[bool, float, datetime, str]:
        """Sorts by the order of the uploads, whatever the order of their messages; first what is from the future."""
        return self.came <= (now + _SKEW).timestamp(), self.came, self.at, self.drop

    @property
    def came(self) -> float:
        """Unix time of its upload, which is no later than its entry: the bucket's clock and ours are two."""
        return min(self.completed, self.at.timestamp())


@dataclass(frozen=True)
class Known:
    """What is remembered of a family. :param announced: ids with their time. :param newest: of all that ever waited."""

    announced: Mapping[str, datetime] = field(default_factory=dict)
    newest: Waiting | None = None


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    :param go: ids whose event may be sent. :param passed: id to the reason, of those that get no run.
    :param batches: ids that become one; after that the rules are asked again. :param held: id to the reason.
    :param until: when the first of the held may go on; None if nobody knows.
    """

    go: tuple[str, ...] = ()
    passed: Mapping[str, str] = field(default_factory=dict)
    batches: tuple[tuple[str, ...], ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    until: datetime | None = None


def decide(
    rules: Intake, waiting: Sequence[Waiting], known: Known, now: datetime, most_bytes: float | None = None
) -> Decision:
    """What becomes of a family's waiting drops. :param most_bytes: that a run may have."""
    passed = _passed(rules, waiting, known, now)
    stays = sorted((one for one in waiting if one.id not in passed), key=lambda one: one.age(now))
    held: dict[str, str] = {}
    times: list[datetime] = []
    turns = _Turns(rules.limit, known.announced.values(), now)

    def hold(those: Iterable[Waiting], why: str, until: datetime) -> None:
        held.update({one.id: why for one in those})
        times.append(until)

    go = [one.id for one in stays if one.announced or one.id in known.announced]
    batches: list[tuple[str, ...]] = []
    for group in _groups(rules, [one for one in stays if one.id not in go], most_bytes):
        closes = _closes(rules, group)
        if closes is not None and now < closes <= now + (rules.gathers or _SKEW) + _SKEW:
            hold(group, f"its family gathers drops until {_told(closes)} (intake.window: {rules.window})", closes)
        elif (free := turns.take()) is not None:
            hold(group, f"its family takes {rules.rate} (intake.rate); the next one from {_told(free)}", free)
        elif closes is None:
            go.append(group[0].id)
        else:
            batches.append(tuple(one.id for one in group))
    return Decision(tuple(go), passed, tuple(batches), held, min(times, default=None))


def remember(rules: Intake, waiting: Sequence[Waiting], known: Known, go: Iterable[str], now: datetime) -> Known:
    """What is to be remembered before the events of `go` are sent."""
    limit = rules.limit
    sent = {one.id for one in waiting if one.announced}
    since = now - limit[1] if limit else now
    # What was announced before there were rules took no turn; what is announced again takes no second one.
    announced = {one: known.announced.get(one, now) for one in go if one not in sent}
    return Known(
        {one: at for one, at in {**known.announced, **announced}.items() if at > since},
        _newest(waiting, known, now),
    )


def _passed(rules: Intake, waiting: Sequence[Waiting], known: Known, now: datetime) -> dict[str, str]:
    if rules.latest_only:
        newest = _newest(waiting, known, now)
        why = "superseded by drop {0.drop} (id {0.id}), which is newer (intake.latest_only)"
        return {one.id: why.format(newest) for one in waiting if newest is not None and one.id != newest.id}
    if rules.gathers is None:
        return {}
    # A batch reads the files as they are now: of several under one name only the last one's are there.
    last = {(one.place, one.drop): one for one in sorted(waiting, key=lambda one: one.age(now)) if _gathers(one)}
    why = "superseded by a newer upload under its name (id {0.id}), which replaced its files (intake.window)"
    return {
        one.id: why.format(last[one.place, one.drop])
        for one in waiting
        if _gathers(one) and last[one.place, one.drop].id != one.id
    }


def _newest(waiting: Sequence[Waiting], known: Known, now: datetime) -> Waiting | None:
    # What is remembered and has not come yet was entered while a clock was ahead: it is newer than nothing.
    before = [one for one in [known.newest] if one is not None and one.came <= now.timestamp()]
    return max([*before, *waiting], key=lambda one: one.age(now), default=None)


def _gathers(one: Waiting) -> bool:
    return not one.batch and not one.announced


def _groups(rules: Intake, those: Sequence[Waiting], most_bytes: float | None) -> list[list[Waiting]]:
    """What goes together, the oldest first: batches that are made, then those to come, of one bucket and no larger than
    one drop may be; without a window each drop is one."""
    if rules.gathers is None:
        return [[one] for one in those]
    places: dict[tuple[str, str], list[Waiting]] = {}
    for one in those:
        if not one.batch:
            places.setdefault((one.place, one.group), []).append(one)
    parts = [part for found in places.values() for part in _cut(found, most_bytes)]
    return [*([one] for one in those if one.batch), *parts]


def _cut(those: Sequence[Waiting], most_bytes: float | None) -> list[list[Waiting]]:
    """In parts that may each be one batch; a drop that is too much alone is one, which its run refuses."""
    parts: list[list[Waiting]] = [[]]
    files = size = 0.0
    for one in those:
        files, size = files + one.files, size + one.size
        too_large = files > MAX_FILES or (most_bytes is not None and size > most_bytes)
        if parts[-1] and (too_large or len(parts[-1]) == BATCH):
            parts.append([])
            files, size = one.files, one.size
        parts[-1].append(one)
    return parts


def divide(drops: Sequence[str], refusal: str) -> tuple[Sequence[str], Sequence[str]]:
    """The two groups in which the drops of a refused batch wait again: the one whose file the refusal names and the
    others, else two halves. A bad drop ends as a batch of its own."""
    named = [drop for drop in drops if re.search(rf"(?<![^\s'\"(]){re.escape(drop)}/", refusal)]
    if len(named) == 1:
        return named, [drop for drop in drops if drop not in named]
    return drops[: len(drops) // 2], drops[len(drops) // 2 :]


def _closes(rules: Intake, group: Sequence[Waiting]) -> datetime | None:
    """When the group's window closes; None where nothing is gathered (any more)."""
    window = rules.gathers
    if window is None or group[0].batch:
        return None
    return min(one.at for one in group) + (timedelta(0) if group[0].group else window)


class _Turns:
    """Who may be announced now, by the rate."""

    def __init__(self, limit: tuple[int, timedelta] | None, taken: Iterable[datetime], now: datetime) -> None:
        self._limit, self._now = limit, now
        self._taken = sorted(at for at in taken if limit is not None and now - limit[1] < at <= now + _SKEW)

    def take(self) -> datetime | None:
        """Take a turn; if there is none, when there will be one."""
        if self._limit is None:
            return None
        number, period = self._limit
        if len(self._taken) >= number:
            return self._taken[-number] + period
        self._taken.append(self._now)
        return None


def _told(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
