"""Rows of a Parquet file: only known columns, a few rows at a time, text checked to be UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from curation.reasons import Reason
from curation.records import HEAD, Fault, Found, Record
from curation.streams import Limits, TornError

_BATCH: Final = 256


def row_groups(path: Path) -> list[int]:
    """Uncompressed bytes of each row group; empty if the file cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            return [file.metadata.row_group(index).total_byte_size for index in range(file.metadata.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError):
        return []


def read_parquet(
    path: Path, start: int, end: int | None, wanted: frozenset[str], max_row_bytes: int, limits: Limits
) -> Iterator[Record]:
    """Rows of the row groups [start, end); their places are row numbers in the file.

    :param wanted: columns to read, in small letters.
    """
    try:
        file = pq.ParquetFile(path, memory_map=False, pre_buffer=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        with path.open("rb") as stream:
            yield Fault(0, Reason.BAD_PARQUET, _cause(error), stream.read(HEAD))
        return
    with file:
        size = path.stat().st_size
        columns = [name for name in file.schema_arrow.names if name.strip().lower() in wanted]
        last = file.metadata.num_row_groups if end is None else end
        row = sum(file.metadata.row_group(index).num_rows for index in range(start))
        produced = 0
        for index in range(start, last):
            rows = file.metadata.row_group(index).num_rows
            done = 0
            try:
                limits.check(produced + file.metadata.row_group(index).total_byte_size, size)
                if not columns:
                    names = ", ".join(file.schema_arrow.names)[:100]
                    for number in range(rows):
                        yield Fault(row + number, Reason.NO_CONTENT, f"fields: {names}", b"")
                    done = rows
                    continue
                for batch in file.iter_batches(_BATCH, row_groups=[index], columns=columns, use_threads=False):
                    produced += batch.nbytes
                    limits.check(produced, size)
                    yield from batch_rows(batch, row + done, max_row_bytes)
                    done += batch.num_rows
            except TornError as tear:
                yield Fault(row + done, tear.reason, tear.detail, b"")
                return
            except (pa.ArrowException, OSError, ValueError) as error:
                # What is left of this row group is lost; the next one may be sound.
                yield Fault(
                    row + done, Reason.BAD_PARQUET, f"rows {row + done} to {row + rows - 1}: {_cause(error)}", b""
                )
            finally:
                row += rows


def batch_rows(batch: pa.RecordBatch, first: int, max_row_bytes: int) -> Iterator[Found | Fault]:
    """The rows of a batch. :param first: the place of its first one."""
    try:
        rows: list[dict[str, Any] | None] = list(batch.to_pylist())
    except UnicodeDecodeError:
        rows = [_one(batch.slice(index, 1)) for index in range(batch.num_rows)]
    # Exact sizes are only worth their price where a row could be too long.
    suspicious = batch.nbytes > max_row_bytes
    for index, fields in enumerate(rows):
        if fields is None:
            yield Fault(first + index, Reason.BAD_ENCODING, "a text is not UTF-8", b"")
        elif suspicious and batch.slice(index, 1).nbytes > max_row_bytes:
            size = batch.slice(index, 1).nbytes
            yield Fault(first + index, Reason.TOO_LARGE, f"{size} bytes", b"")
        else:
            yield Found(first + index, fields, b"")


def _one(row: pa.RecordBatch) -> dict[str, Any] | None:
    try:
        return dict(row.to_pylist()[0])
    except UnicodeDecodeError:
        return None


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
