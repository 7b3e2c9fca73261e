"""Ends a run whose GPUs do nothing for long (`compute.idle`): they are paid for like those that work.

A thread of each node's launcher reads how busy the node's GPUs are. Time counts while ranks train or evaluate, which
their signs of life tell (`trainer.node.heart`); what may take any time, as preparation, a save or the export, does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainer.node.heart import read_beat
from trainer.node.system import Gpus, find_gpus

EVERY: Final = 2.0  # seconds; the driver tells what a GPU did in about the last one
_FROZEN: Final = 3 * EVERY  # seconds that one look counts at most: a node that stood still as a whole proves nothing
_USE: Final = "_utilization_percentage"


@dataclass(frozen=True)
class Policy:
    """GPUs are idle if each is below so many percent for so many minutes."""

    below_percent: float
    minutes: float

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Policy | None:
        """What a run's recipe says; one of an earlier version says nothing."""
        found = (recipe.get("compute") or {}).get("idle")
        return None if found is None else cls(float(found["below_percent"]), float(found["minutes"]))


@dataclass
class Idleness:
    """For how long the GPUs have been idle. Pure: told of looks, it decides."""

    policy: Policy
    seconds: float = 0.0

    def look(self, busiest: float | None, works: bool, seconds: float) -> bool:
        """Whether it is enough.

        :param busiest: percent of the busiest GPU; None if it cannot be read, which proves nothing.
        :param works: whether a rank trains or evaluates. :param seconds: since the look before.
        """
        if busiest is not None and busiest >= self.policy.below_percent:
            self.seconds = 0.0
        elif busiest is not None and works:
            self.seconds += min(seconds, _FROZEN)
        return self.seconds >= 60 * self.policy.minutes

    @property
    def told(self) -> str:
        return (
            f"the GPUs of this pod were idle: below {self.policy.below_percent:g} % for {self.policy.minutes:g} minutes"
            " of training, which `compute.idle` does not allow"
        )


def busiest(sample: Mapping[str, float], visible: str | None) -> float | None:
    """Percent of the busiest GPU of this pod. :param visible: CUDA_VISIBLE_DEVICES, which chooses by indices."""
    uses = {key.removesuffix(_USE): value for key, value in sample.items() if key.startswith("gpu_") and _USE in key}
    indices = [part.strip() for part in (visible or "").split(",") if part.strip()]
    if indices and all(part.isdecimal() for part in indices):
        uses = {name: value for name, value in uses.items() if name.removeprefix("gpu_") in indices}
    return max(uses.values(), default=None)


class IdleWatch:
    """Looks until it is closed, and calls `stop` once with the reason.

    :param folder: where the ranks' signs of life are. :param tell: adds a line to a rank's log.
    """

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        ranks: range,
        *,
        stop: Callable[[str], Any],
        tell: Callable[[int, str], Any],
        visible: str | None = None,
        gpus: Callable[[], Gpus | None] = find_gpus,
        every: float = EVERY,
    ) -> None:
        self._idleness, self._folder, self._ranks = Idleness(policy), folder, ranks
        self._stop, self._tell, self._visible, self._gpus, self._every = stop, tell, visible, gpus, every
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * self._every)

    def _run(self) -> None:
        gpus = self._gpus()
        if gpus is None:
            self._tell(self._ranks.start, "compute.idle: the GPUs' driver does not answer, so they are not watched")
            return
        looked = time.monotonic()
        while not self._closing.wait(self._every):
            now, before = time.monotonic(), looked
            looked = now
            beats = [beat for rank in self._ranks if (beat := read_beat(self._folder, rank)) is not None]
            use = busiest(gpus.sample(), self._visible)
            if self._idleness.look(use, any(beat.limit is not None for beat in beats), now - before):
                self._stop(self._idleness.told)
                return
