"""Finds ranks that hang, says which and where, and ends them: a collective alone would wait for half an hour.

It runs in the launcher of each node, reads the ranks' signs of life (`trainer.node.heart`), and exchanges them with the
other nodes when something hangs. Time is counted in own looks, so a node that was frozen as a whole blames nobody.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from trainer.node.heart import DUMP, EVERY, Beat, read_beat, stack_file

_FROZEN: Final = 2 * EVERY  # seconds that one look counts at most
_SILENT: Final = 5 * EVERY  # seconds without a pulse after which a process does not run
_ANSWER: Final = 3.0  # seconds that stacks and flight records may take
_OTHERS: Final = 5.0  # seconds that the other nodes may take
_KEY: Final = "hang"
_AWAITED: Final = "awaited"
_WAITING: Final = 5  # times as long for who waits for a rank that may take any time


@dataclass(frozen=True)
class Standing:
    """A rank's last sign of life. :param waited: seconds without a mark. :param silent: without a pulse as well."""

    beat: Beat
    waited: float
    silent: bool

    def overdue(self, awaited: int | None = None) -> bool:
        """Whether it hangs. :param awaited: see `awaited`; who waits for such a rank has five times as long."""
        limit, entered = self.beat.limit, self.beat.entered
        waits = awaited is not None and entered is not None and awaited < entered
        return limit is not None and self.waited > limit * (_WAITING if waits else 1)


def awaited(standings: Iterable[Standing]) -> int | None:
    """Collectives entered by the last of the ranks that run and are where any time is right; None without one.

    Rank 0 may delete checkpoints or write a profile for longer than a step takes, while the others wait in the next.
    """
    resting = [one.beat.entered for one in standings if one.beat.limit is None and not one.silent]
    return min((entered for entered in resting if entered is not None), default=None)


@dataclass
class Patience:
    """Counts how long each rank has been in one place."""

    last: dict[int, Standing] = field(default_factory=dict)
    still: dict[int, float] = field(default_factory=dict)

    def look(self, beats: Iterable[Beat], seconds: float) -> list[Standing]:
        """What is known of the ranks that give signs; one that gives none any more has ended.

        :param seconds: since the look before.
        """
        seconds, found = min(seconds, _FROZEN), list(beats)
        for rank in set(self.last) - {beat.rank for beat in found}:
            del self.last[rank]
        for beat in found:
            rank, before = beat.rank, self.last.get(beat.rank)
            moved = before is None or before.beat.mark != beat.mark
            alive = before is None or before.beat.pulse != beat.pulse
            self.still[rank] = 0.0 if alive else self.still[rank] + seconds
            waited = 0.0 if moved or before is None else before.waited + seconds
            self.last[rank] = Standing(beat, waited, self.still[rank] > _SILENT)
        return [self.last[rank] for rank in sorted(self.last)]


def blame(standings: list[Standing]) -> tuple[int | None, str]:
    """Which rank hangs, and a sentence that says so; a pure function.

    A process that does not run is the cause; else the rank that has entered fewer collectives than its peers is, for
    they wait in the next one.
    """
    silent = [one for one in standings if one.silent]
    if silent:
        beat = silent[0].beat
        return beat.rank, (
            f"rank {beat.rank} hangs: its process does not run (stopped, or inside the kernel or a driver), last seen "
            f"in {beat.phase}, {beat.place}"
        )
    if len(standings) == 1:
        beat = standings[0].beat
        return beat.rank, f"rank {beat.rank} hangs in {beat.phase}, {beat.place}"
    counts = [one.beat.entered for one in standings]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and min(known) < max(known):
        behind = [one.beat for one in standings if one.beat.entered == min(known)]
        ahead = max(standings, key=lambda one: one.beat.entered or 0).beat
        others = f" (as do {len(behind) - 1} more)" if len(behind) > 1 else ""
        return behind[0].rank, (
            f"rank {behind[0].rank} hangs in {behind[0].phase}, {behind[0].place}{others}: it did not come to "
            f"collective {min(known) + 1}, where rank {ahead.rank} waits, {ahead.place}"
        )
    beat = max(standings, key=lambda one: one.waited).beat
    return None, (
        f"all {len(standings)} ranks hang in {beat.phase}, rank {beat.rank} {beat.place}, and none is behind the "
        "others: look at the network and the devices"
    )


class Watchdog:
    """Watches the ranks of this node until `close`.

    :param ranks: of this node. :param world: of all nodes.
    :param signal_stacks, kill: signal all ranks of this node. :param tell: adds a line to a rank's log.
    :param store: makes a client of the store that all nodes share; None on one node.
    """

    def __init__(
        self,
        folder: Path,
        ranks: range,
        world: int,
        *,
        signal_stacks: Callable[[], Any],
        kill: Callable[[], Any],
        tell: Callable[[int, str], Any],
        store: Callable[[], Any] | None = None,
    ) -> None:
        self._folder, self._ranks, self._world = folder, ranks, world
        self._signal_stacks, self._kill, self._tell, self._make_store = signal_stacks, kill, tell, store
        self._store: Any = None
        self._patience = Patience()
        self._looked = 0.0
        self._told: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.found: tuple[int | None, str] | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> tuple[int | None, str] | None:
        """End; what hung, if anything did."""
        self._closing.set()
        self._thread.join(_SILENT + _ANSWER + _OTHERS + 4)
        return self.found

    def _run(self) -> None:
        self._looked = time.monotonic()
        while not self._closing.wait(EVERY):
            standings = self._look()
            self._tell_awaited(standings)
            if not (self._overdue(standings) or self._others_found()):
                continue
            standings = self._settled(standings)
            if self._overdue(standings) or self._others_found():  # it may have gone on, or ended
                self._end(standings)
                return

    def _overdue(self, standings: list[Standing]) -> bool:
        if not any(one.overdue() for one in standings):
            return False
        known = [awaited(standings), *self._awaited_elsewhere()]
        return any(one.overdue(min((found for found in known if found is not None), default=None)) for one in standings)

    def _tell_awaited(self, standings: list[Standing]) -> None:
        """Let the other nodes know of ranks that rest for long."""
        found = awaited(one for one in standings if one.waited > _SILENT)
        if self._make_store is None or found == self._told:
            return
        with suppress(Exception):  # the first node may be gone, which the ranks find out as well
            self._store = self._store or self._make_store()
            self._store.set(f"{_AWAITED}/{self._ranks.start}", "" if found is None else str(found))
            self._told = found

    def _awaited_elsewhere(self) -> list[int]:
        """What the other nodes have told of theirs."""
        if self._make_store is None:
            return []
        with suppress(Exception):
            self._store = self._store or self._make_store()
            keys = [f"{_AWAITED}/{first}" for first in range(0, self._world, len(self._ranks))]
            told = [self._store.get(key) for key in keys if self._store.check([key])]
            return [int(value) for value in told if value]
        return []

    def _look(self) -> list[Standing]:
        now, before = time.monotonic(), self._looked
        self._looked = now
        beats = [beat for rank in self._ranks if (beat := read_beat(self._folder, rank)) is not None]
        return self._patience.look(beats, now - before)

    def _settled(self, standings: list[Standing]) -> list[Standing]:
        """Look on until each rank has shown that its process runs, or has been silent for long enough."""
        pulses = {one.beat.rank: one.beat.pulse for one in standings}
        end = time.monotonic() + _SILENT + 2 * EVERY
        while time.monotonic() < end and not self._closing.wait(EVERY):
            standings = self._look()
            if all(one.silent or one.beat.pulse != pulses.get(one.beat.rank) for one in standings):
                break
        return standings

    def _end(self, standings: list[Standing]) -> None:
        self._collect(standings)
        everyone = self._exchange(standings)
        self.found = blame(everyone)
        with suppress(OSError):
            (self._folder / "hang.json").write_text(
                json.dumps({"found": self.found[1], "ranks": [asdict(one) for one in everyone]}, indent=1)
            )
        self._kill()
        for one in standings:
            self._report(one)

    def _collect(self, standings: list[Standing]) -> None:
        """Have each rank that can write its stacks and its flight record."""
        (self._folder / DUMP).touch()
        self._signal_stacks()
        awake = [one.beat.rank for one in standings if not one.silent]
        end, before = time.monotonic() + _ANSWER, -1
        while time.monotonic() < end:
            sizes = [self._stacks(rank).count("\n") for rank in awake]
            flights = {path.stem.rpartition("-")[2] for path in self._folder.glob("flight-*.json")}
            if sum(sizes) == before and all(sizes) and flights >= set(map(str, awake)):
                return
            before = sum(sizes)
            time.sleep(0.2)

    def _report(self, one: Standing) -> None:
        beat = one.beat
        self._tell(
            beat.rank,
            f"hang: {beat.phase} for {one.waited:.0f} s (limit {beat.limit or 0:.0f} s), {beat.place}, "
            f"{beat.entered if beat.entered is not None else 'no'} collectives entered",
        )
        lines = self._stacks(beat.rank).splitlines()
        for line in lines or ["hang: no stack, because the process does not run"]:
            self._tell(beat.rank, line)

    def _stacks(self, rank: int) -> str:
        try:
            return stack_file(self._folder, rank).read_text(errors="replace")
        except OSError:
            return ""

    def _others_found(self) -> bool:
        """Whether another node has found that something hangs."""
        if self._make_store is None:
            return False
        with suppress(Exception):  # the first node may be gone, which the ranks find out as well
            self._store = self._store or self._make_store()
            return bool(self._store.check([_KEY]))
        return False

    def _exchange(self, standings: list[Standing]) -> list[Standing]:
        """What all nodes know of their ranks, as far as they answer."""
        if self._make_store is None:
            return standings
        found = {one.beat.rank: one for one in standings}
        with suppress(Exception):
            self._store = self._store or self._make_store()
            for one in standings:
                self._store.set(f"{_KEY}/{one.beat.rank}", json.dumps(asdict(one)))
            self._store.set(_KEY, "1")
            end = time.monotonic() + _OTHERS
            while len(found) < self._world and time.monotonic() < end:
                for rank in set(range(self._world)) - set(found):
                    if self._store.check([f"{_KEY}/{rank}"]):
                        values = json.loads(self._store.get(f"{_KEY}/{rank}"))
                        found[rank] = Standing(**{**values, "beat": Beat(**values["beat"])})
                time.sleep(0.2)
            if any(rank not in self._ranks for rank in found):
                time.sleep(1)  # the store ends with the first node; the others have to read it too
        return [found[rank] for rank in sorted(found)]
