"""What curation asks of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from curation.task import Report, Task


class Tables(Protocol):
    """Tables of one curation, made and read by SQL in the subset that all engines share (`curation.exchange`).

    Each method raises a DropforgeError if the engine cannot do it, for example for want of disk.
    """

    def view(self, name: str, paths: Sequence[Path]) -> None:
        """Give Parquet files of one schema, at least one, a table's name."""

    def do(self, statement: str) -> None:
        """Run a statement that has no result, such as `create table NAME as ...`."""

    def one(self, statement: str) -> tuple[Any, ...]:
        """The first row of a small result."""

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        """A small result as Python's values; lists of structs are lists of dicts."""

    def batches(self, statement: str, rows: int = 4096) -> Iterator[pa.RecordBatch]:
        """Stream a result in its order, in bounded memory, by batches of at most about `rows` rows."""


class Engine(Protocol):
    """Workers for the kernel, and tables over what they write."""

    def run(self, tasks: Sequence[Task], planned: int) -> Iterator[tuple[Task, Report]]:
        """Work on all tasks; results come as they are ready.

        :param planned: bytes that all tasks read.
        :raises DropforgeError: if a worker dies twice over the same split.
        """

    def tables(self, scratch: Path) -> AbstractContextManager[Tables]:
        """Tables of one curation. :param scratch: folder for what does not fit into memory."""
