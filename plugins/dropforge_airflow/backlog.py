"""When waiting work deserves another nudge: pure rules, one per place where an event can be lost.

Airflow loses triggers in a burst and drops partition events of a paused DAG. The objects under `ledger/` stay, so
whatever waits longer than it should is woken again, each time a little later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass
class Backlog:
    """Remembers what has been waiting, by its key; used by the trigger, whose process lives long.

    :param after: seconds that a key may wait before the first nudge; the pause doubles with each nudge.
    :param longest: the longest pause, in seconds.
    """

    after: float = 20.0
    longest: float = 60.0
    _due: dict[str, tuple[float, float]] = field(default_factory=dict)

    def overdue(self, keys: Iterable[str], now: float) -> int:
        """Note which keys wait at `now` (any clock that only goes forward); the number that deserve a nudge."""
        known = self._due
        self._due = {key: known.get(key, (now + self.after, self.after)) for key in set(keys)}
        late = {key for key, (due, _) in self._due.items() if now >= due}
        if late:
            # A nudge has everything looked at, so that many keys have no more of them than one.
            pauses = {
                key: min(2 * pause if key in late else pause, self.longest) for key, (_, pause) in self._due.items()
            }
            self._due = {key: (now + pause, pause) for key, pause in pauses.items()}
        return len(late)

    def look_soon(self, now: float) -> None:
        """Begin with the short pauses again: something has changed for what waits."""
        self._due = dict.fromkeys(self._due, (now + self.after, self.after))


@dataclass(frozen=True)
class Nudged:
    """How often, and when last, the event of a waiting drop was sent."""

    times: int = 0
    last: datetime | None = None


def deserves_event(nudged: Nudged, now: datetime, *, after: float = 20.0, longest: float = 600.0) -> bool:
    """Whether the event of an unclaimed drop is to be sent (again): at once, then after pauses that double."""
    if nudged.last is None or nudged.times == 0:
        return True
    pause = min(after * 2.0 ** min(nudged.times - 1, 30), longest)
    # It was sent in the future if the clock was set back since.
    return not timedelta(0) <= now - nudged.last < timedelta(seconds=pause)
