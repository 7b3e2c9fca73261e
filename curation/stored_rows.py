"""Rows of a Parquet object in the bucket: those of a shard or a ledger that are wanted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from dropforge.store import Store


@contextmanager
def stored_file(store: Store, key: str) -> Iterator[Path]:
    """A copy of the object, as long as it is read. :raises MissingObjectError: if it is gone."""
    with tempfile.TemporaryDirectory(prefix="stored-") as folder:
        path = Path(folder) / "rows.parquet"
        store.download(key, path)
        yield path


def stored_rows(store: Store, key: str, wanted: pc.Expression | None, columns: list[str]) -> list[dict[str, Any]]:
    """:raises MissingObjectError: if the object is gone."""
    with stored_file(store, key) as path:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=columns, filters=wanted).to_pylist()
    return rows
