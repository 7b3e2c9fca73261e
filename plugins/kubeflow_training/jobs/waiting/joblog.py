"""The log of a job as one waits for it: the ranks' lines with their prefix, up to a limit, and what follows from them.

Writing never holds up the event loop: lines are written in slices, one slice of one job at a time, and whoever has more
waits for its turn. So a reader is held back by its writer, and memory stays bounded.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.observation.progress import MARK, Progress, parse
from kubeflow_training.jobs.shapes import storable
from kubeflow_training.jobs.waiting.turns import turn

LOG_ANNOTATION: Final = "kubeflow-training/log"
"""Annotation of a job with the address at which its trainer keeps the whole log."""
TAIL: Final = 20
"""Last lines kept of each rank, for the failure's text."""
_TAIL_LINE: Final = 2000  # characters
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_LIMIT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(lines?)|([KMG]I?|)B(?:YTES?)?)", re.I)


@dataclass(frozen=True)
class LogLimit:
    """How much of a job's log is shown; None is no limit."""

    lines: int | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, value: int | str | None) -> LogLimit:
        """From a number of lines, or text like "5000 lines", "20 MB", "64 KiB".

        :raises JobError: if it is neither.
        """
        if value is None:
            return cls()
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(lines=value)
        found = _LIMIT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise JobError(f"log_limit {value!r}", "it is no amount", "Write a number of lines, or text like `20 MB`")
        if found[2]:
            return cls(lines=int(float(found[1])))
        return cls(bytes=int(float(found[1]) * _UNITS[found[3].upper()]))

    def __str__(self) -> str:
        return f"{self.lines} lines" if self.lines is not None else f"{self.bytes} bytes"


class JobLog:
    """
    Progress marks are read and not shown: they are for programs.

    :param write: shows one line.
    :param limit: how much to show in all; afterwards only progress is read from the lines.
    :param left: what `state` told an earlier process about this job.
    """

    def __init__(
        self, write: Callable[[str], None], limit: LogLimit | None = None, left: Mapping[str, Any] | None = None
    ) -> None:
        left = left or {}
        self._write, self._limit = write, limit or LogLimit()
        self.positions: dict[str, Mapping[str, Any]] = dict(left.get("positions") or {})
        self.progress = Progress.from_dict(left.get("progress"))
        self.lines, self.bytes = int(left.get("lines") or 0), int(left.get("bytes") or 0)
        self.full = bool(left.get("full"))
        self.gaps: list[dict[str, Any]] = list(left.get("gaps") or [])
        self.where: str | None = None
        """Address of the whole log, if the job names one."""
        self._tails: dict[str, deque[str]] = {}
        self.version = 0
        """Rises with every change of `state`."""

    def state(self) -> dict[str, Any]:
        """Plain values with which another process goes on."""
        return {
            "positions": {name: dict(position) for name, position in self.positions.items()},
            "progress": storable(self.progress.to_dict()) if self.progress else None,
            "lines": self.lines,
            "bytes": self.bytes,
            "full": self.full,
            "gaps": storable(self.gaps),
        }

    def tails(self) -> dict[str, list[str]]:
        """The last lines that each rank wrote, as far as this process saw them, in characters that a database takes."""
        return {replica: storable(list(lines)) for replica, lines in self._tails.items()}

    def say(self, line: str) -> None:
        """Show a line that no rank wrote."""
        self._write(line)

    async def add(
        self, pod: str, replica: str, lines: Sequence[str], position: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """Show lines of a rank, waiting for a turn; returns when all are shown.

        :param position: where to go on after the line of that index.
        """
        tail = self._tails.setdefault(replica, deque(maxlen=TAIL))
        done = 0
        while done < len(lines):
            async with turn() as end:
                while done < len(lines):
                    self._show(replica, lines[done], tail)
                    done += 1
                    if time.monotonic() > end:
                        break
                self.positions[pod] = position(done - 1)
                self.version += 1

    def learn(self, line: str) -> None:
        """Take a line's progress without showing the line."""
        if MARK in line and (found := parse(line)) and found != self.progress:
            self.progress = found
            self.version += 1

    def moved(self, pod: str, position: Mapping[str, Any]) -> None:
        """The position of a pod changed without a line."""
        self.positions[pod] = position
        self.version += 1

    def gap(self, replica: str, since: str | None, until: str | None, why: str) -> None:
        """State that lines between two moments cannot be read any more."""
        self.gaps = [*self.gaps, {"rank": replica, "from": since, "to": until, "why": why}][-50:]
        self.version += 1
        start, end = since or "its beginning", until or "its end"
        self._write(f"[{replica}] -- lines may be missing here, from {start} to {end}: {why} --")

    def _show(self, replica: str, line: str, tail: deque[str]) -> None:
        if MARK in line and (found := parse(line)):
            self.progress = found
            return
        tail.append(line[:_TAIL_LINE])
        if self.full:
            return
        size = len(line) + 1
        limit = self._limit
        if (limit.lines is not None and self.lines >= limit.lines) or (
            limit.bytes is not None and self.bytes + size > limit.bytes
        ):
            self.full = True
            rest = f"the rest is at {self.where}" if self.where else "the rest stays in the pods' own logs"
            self._write(f"-- log_limit of {limit} is reached and nothing more is shown here; {rest} --")
            return
        self.lines += 1
        self.bytes += size
        self._write(f"[{replica}] {line}")
