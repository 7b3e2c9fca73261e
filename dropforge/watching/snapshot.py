"""What was read of all sources at one time, and the bounds that hold for whatever comes in. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dropforge.watching.airflow_state import Dag
from dropforge.watching.drops import Ledger
from dropforge.watching.runs import Seen
from dropforge.watching.trainings import Folder

SOURCES: Final = ("ledger", "mlflow", "folders", "airflow")
OTHER: Final = "other"
FAMILIES: Final = 200
"""Families with series of their own: who may upload may name families, and each costs Prometheus a hundred series."""


@dataclass(frozen=True)
class Source:
    """How the last look at a source went.

    :param succeeded: when one did for the last time, in seconds since 1970; 0 if none ever has.
    :param seconds: how long the last one took.
    """

    up: bool = False
    succeeded: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """
    :param at: when it was taken, in seconds since 1970.
    :param ledger, runs, dags: None where nothing is known that is young enough to be told.
    :param folders: of open runs, by the run's name; of those that could be read.
    """

    at: float
    sources: Mapping[str, Source] = field(default_factory=dict)
    ledger: Ledger | None = None
    runs: Sequence[Seen] | None = None
    folders: Mapping[str, Folder] = field(default_factory=dict)
    dags: Mapping[str, Dag] | None = None


class Names:
    """Which families have series of their own: the first that were seen, so that none loses its series to a new one."""

    def __init__(self, most: int = FAMILIES) -> None:
        self._most = most
        self._own: set[str] = set()
        self._folded: set[str] = set()

    def take(self, families: Iterable[str]) -> None:
        """Families that are there; the same ones come in the same order after a restart."""
        for family in sorted(set(families) - self._own):
            (self._own if len(self._own) < self._most else self._folded).add(family)

    def label(self, family: str) -> str:
        return family if family in self._own else OTHER

    @property
    def own(self) -> list[str]:
        return sorted(self._own)

    @property
    def folded(self) -> int:
        return len(self._folded)
