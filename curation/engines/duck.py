"""The embedded engine: worker processes of our own, and DuckDB within a limit of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from curation.pool import run_all
from curation.task import Report, Task
from dropforge.errors import DropforgeError

#: Below this many bytes a pool of processes costs more than it brings.
POOL_FROM_BYTES: Final = 24 << 20


@dataclass(frozen=True)
class Memory:
    """What DuckDB may hold before it spills to disk."""

    limit: str = "512MB"
    threads: int = 2


DEFAULT_MEMORY: Final = Memory()


def processes(workers: int, planned: int) -> int:
    """How many work on a drop of so many bytes. :param workers: as the recipe says; 0 takes what the machine has."""
    pool = min(len(os.sched_getaffinity(0)), 8) if planned >= POOL_FROM_BYTES else 1
    return workers or pool


@dataclass(frozen=True)
class Embedded:
    """This machine. :param workers: processes; 0 takes what the machine has."""

    workers: int = 0
    memory: Memory = DEFAULT_MEMORY

    def run(self, tasks: Sequence[Task], planned: int) -> Iterator[tuple[Task, Report]]:
        return run_all(tasks, processes(self.workers, planned))

    def tables(self, scratch: Path) -> DuckTables:
        return DuckTables(scratch, self.memory)


class DuckTables:
    """`Tables` in DuckDB. :param spill: folder for what memory does not hold."""

    def __init__(self, spill: Path, memory: Memory = DEFAULT_MEMORY) -> None:
        spill.mkdir(parents=True, exist_ok=True)
        self.db = duckdb.connect(
            config={
                "memory_limit": memory.limit,
                "threads": max(1, min(memory.threads, os.cpu_count() or 1)),
                "temp_directory": str(spill),
                "preserve_insertion_order": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )

    def __enter__(self) -> DuckTables:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def view(self, name: str, paths: Sequence[Path]) -> None:
        self.db.read_parquet([str(path) for path in paths]).create_view(name)

    def do(self, statement: str) -> None:
        try:
            self.db.execute(statement)
        except duckdb.Error as error:
            raise _explain(error) from error

    def one(self, statement: str) -> tuple[Any, ...]:
        return self.all(statement)[0]

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        try:
            return self.db.execute(statement).fetchall()
        except duckdb.Error as error:
            raise _explain(error) from error

    def batches(self, statement: str, rows: int = 4096) -> Iterator[pa.RecordBatch]:
        """By `sql`, never by `execute`: with DuckDB 2.0, `execute(...).to_arrow_reader()` gives sorted rows out of
        order."""
        try:
            yield from self.db.sql(statement).to_arrow_reader(rows)
        except duckdb.Error as error:
            raise _explain(error) from error


def _explain(error: duckdb.Error) -> DropforgeError:
    cause = " ".join(str(error).split())[:300]
    full = "No space left" in cause or "max_temp_directory_size" in cause
    return DropforgeError(
        "curation's sorting",
        f"DuckDB stopped: {cause}",
        "Free space in the work folder" if full else "Give it more memory, or a larger disk for the work folder",
    )
