"""Rows of a Parquet object in the bucket: those of a shard or a ledger that are wanted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dropforge.errors import DataError
from dropforge.store import Store


@contextmanager
def stored_file(store: Store, key: str) -> Iterator[Path]:
    """A copy of the object, as long as it is read.

    :raises MissingObjectError: if it is gone. :raises DataError: if what is read of it is not there.
    """
    with tempfile.TemporaryDirectory(prefix="stored-") as folder:
        path = Path(folder) / "rows.parquet"
        store.download(key, path)
        try:
            yield path
        except (pa.ArrowException, KeyError, TypeError) as error:
            cause = f"it cannot be read: {' '.join(str(error).split())[:200]}"
            raise DataError(f"object {store.uri}/{key}", cause, "Restore it from the bucket's versions") from error


def stored_rows(store: Store, key: str, wanted: pc.Expression | None, columns: list[str]) -> list[dict[str, Any]]:
    """:raises MissingObjectError: if the object is gone. :raises DataError: if it has no such rows."""
    with stored_file(store, key) as path:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=columns, filters=wanted).to_pylist()
    return rows
