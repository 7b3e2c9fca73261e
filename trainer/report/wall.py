"""Where the time of a run went: each second of rank 0 belongs to one phase, from the launcher's start to the report.

The totals travel in the checkpoint. What a checkpoint does not know, the time from its copy of the state to the start
of the launcher that resumes from it, is lost to restarts: so the phases of all attempts add up to the wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

Phase = Literal["load", "data", "train", "evaluation", "save", "export", "restarts"]
PHASES: Final[tuple[Phase, ...]] = ("load", "data", "train", "evaluation", "save", "export", "restarts")
BEGAN_KEY: Final = "began.json"  # when the run's first launcher started
BEGAN_VARIABLE: Final = "DROPFORGE_BEGAN"  # Unix time at which the launcher of this node started


class Wall:
    """A stopwatch with one hand for each phase, of which one always runs; it begins with `load`.

    :param began: Unix time from which this process counts; now if not given.
    """

    def __init__(
        self, began: float | None = None, now: Callable[[], float] = time.time, clock: Callable[[], float] | None = None
    ) -> None:
        self._now, self._clock = now, clock or time.perf_counter
        self._since = self._clock()
        moment = now()
        # A clock that was set back must not make time negative.
        self.began = moment if began is None else min(began, moment)
        self._phase: Phase = "load"
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._seconds["load"] = moment - self.began

    def enter(self, phase: Phase) -> Phase:
        """What begins now; what ended."""
        moment = self._clock()
        self._seconds[self._phase] += moment - self._since
        self._since, before, self._phase = moment, self._phase, phase
        return before

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A phase, and afterwards again the one before it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Count some of a phase's seconds to another one."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def resume(self, before: Mapping[str, float], copied: float | None) -> None:
        """Take over what earlier attempts counted.

        :param before: their totals. :param copied: Unix time up to which these go; None if nothing came before.
        """
        for phase in PHASES:
            self._seconds[phase] += float(before.get(phase, 0.0))
        if copied is not None:
            self._seconds["restarts"] += max(0.0, self.began - copied)

    def totals(self) -> dict[str, float]:
        """Seconds of each phase over all attempts, up to now."""
        self.enter(self._phase)
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}

    def now(self) -> float:
        """Unix time."""
        return self._now()


def began_from_env(env: Mapping[str, str]) -> float | None:
    """When the launcher of this node started; None without one."""
    try:
        return float(env[BEGAN_VARIABLE])
    except (KeyError, ValueError):
        return None
