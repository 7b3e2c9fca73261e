"""Where a job stands in the local cluster's queue: a person may hold it back, or give it precedence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.local.capacity import Resources
from kubeflow_training.jobs.local.layout import read_json, write_json

HELD: Final = "held back by a user until it is released"
MOST: Final = 1_000_000  # of a priority, above and below


@dataclass(frozen=True)
class Standing:
    """What clients have said of a job. :param priority: the highest is first, equal ones in the order they came."""

    held: bool = False
    priority: int = 0

    @classmethod
    def read(cls, folder: Path, uid: str) -> Standing:
        """Of the job in a folder; that of a job which had its name before does not count."""
        found = read_json(folder / "queue.json") or {}
        priority = found.get("priority")
        if found.get("uid") != uid or not isinstance(priority, int):
            return cls()
        return cls(found.get("held") is True, priority)

    def write(self, folder: Path, uid: str) -> None:
        """:raises FileNotFoundError: if the job is gone."""
        write_json(folder / "queue.json", {"uid": uid, "held": self.held, "priority": self.priority})

    def turn(self, order: int, uid: str) -> tuple[Any, ...]:
        """Sorts the jobs that wait. :param order: when the job was created."""
        return (-self.priority, order, uid)


@dataclass(frozen=True)
class Waiting:
    """A job in the queue. :param position: 1 is the next; None while it is held back. :param why: in words."""

    name: str
    namespace: str
    uid: str
    standing: Standing
    position: int | None
    needs: Resources
    why: str


@dataclass(frozen=True)
class Working:
    """A job that uses the machine. :param uses: until its last pod has ended."""

    name: str
    namespace: str
    uid: str
    uses: Resources
