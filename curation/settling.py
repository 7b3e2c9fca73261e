"""Settling, told statement by statement: which of how many, how long it took, and how many rows it made."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from curation import exchange
from curation.engines.tables import Tables
from curation.pace import duration
from curation.task import Rules

#: A statement that took less (seconds) has no line of its own.
_SLOW: Final = 2.0
_CREATE: Final = re.compile(r"\s*create table (\w+?)(?:_\d+)? as")


class Watched:
    """`Tables` that tell of each table that is made.

    :param tell: called with the tables that are made, and how many there will be; each further round of a loop adds to
        them.
    :param say: told in a line what took long. :param clock: seconds that never go back.
    """

    def __init__(
        self,
        tables: Tables,
        planned: Counter[str],
        tell: Callable[[int, int], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tables, self.tell, self.say, self.clock = tables, tell, say, clock
        self._left, self.done, self._total = Counter(planned), 0, planned.total()

    def view(self, name: str, paths: Sequence[Path]) -> None:
        self.tables.view(name, paths)

    def do(self, statement: str) -> None:
        made = _CREATE.match(statement)
        if made is None:
            self.tables.do(statement)
            return
        name = made[1]
        if self._left[name]:
            self._left[name] -= 1
        else:
            self._total += 1
        self.tell(self.done, self._total)
        began = self.clock()
        self.tables.do(statement)
        self.done += 1
        if (took := self.clock() - began) >= _SLOW:
            [table] = re.findall(r"create table (\w+)", statement)
            rows = self.tables.one(f"select count(*) from {table}")[0]  # noqa: S608
            self.say(f"deduplicate: {self.done} of {self._total}, {name}: {rows:,} rows in {duration(took)}")

    def one(self, statement: str) -> tuple[Any, ...]:
        return self.tables.one(statement)

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        return self.tables.all(statement)

    def batches(self, statement: str, rows: int = 4096) -> Iterator[pa.RecordBatch]:
        return self.tables.batches(statement, rows)


def planned(rules: Rules) -> Counter[str]:
    """The tables that settling makes, with one round of each loop."""
    dry = _Dry()
    exchange.settle(dry, rules)
    return dry.made


class _Dry:
    """`Tables` without a row."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def view(self, name: str, paths: Sequence[Path]) -> None:
        """Nothing is read."""

    def do(self, statement: str) -> None:
        if made := _CREATE.match(statement):
            self.made[made[1]] += 1

    def one(self, _statement: str) -> tuple[Any, ...]:
        return 0, 0, 0, 0

    def all(self, _statement: str) -> list[tuple[Any, ...]]:
        return []

    def batches(self, _statement: str, _rows: int = 4096) -> Iterator[pa.RecordBatch]:
        return iter(())


def settle(
    tables: Tables,
    rules: Rules,
    *,
    trained: bool,
    evaluated: bool,
    tell: Callable[[int, int], None],
    say: Callable[[str], None],
) -> int:
    """`exchange.settle`, told. Returns how many tables it made. :param tell: and :param say: see `Watched`."""
    watched = Watched(tables, planned(rules), tell, say)
    exchange.settle(watched, rules, trained=trained, evaluated=evaluated)
    return watched.done
