"""Rows of a Parquet file: only known columns, a few rows at a time, text checked to be UTF-8."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation.classes import class_names, named
from curation.expanded import expanded, row_sizes, shares
from curation.freed import give_back
from curation.memory import bounded, too_much
from curation.nesting import parse_text
from curation.parquet_footer import UNREADABLE, open_parquet
from curation.reasons import Reason, RejectError
from curation.records import HEAD, Fault, Found, Record
from curation.streams import STEP, Limits, TornError

_BATCH: Final = 256
_NAME: Final = 100  # characters of a column's name
_CAUSE: Final = 200  # and of what is wrong in it
#: What is wrong with one value, where a batch of rows becomes objects of Python.
_OF_ROWS: Final = (pa.ArrowException, ArithmeticError, LookupError, ValueError)
#: Rows at a time where more would take too much memory: a dictionary's long value may stand in each of them.
_FEW: Final = 8


class Produced:
    """What came out of a file so far. :param size: of the file, in bytes."""

    def __init__(self, size: int, limits: Limits) -> None:
        self.size, self.limits, self.total = size, limits, 0
        self.rows = max(limits.rows, size)

    def add(self, more: int) -> None:
        """:raises TornError: if that is too much for the file."""
        self.total += more
        self.limits.check(self.total, self.size)

    def take(self, first: int, rows: int) -> Iterator[int]:
        """How many of so many rows may come: some that differ take a byte each, as in other compressed files.

        :param first: the place of the first one. :raises TornError: behind them, if there are more.
        """
        left = min(rows, max(0, self.rows - first))
        yield left
        if left < rows:
            raise TornError(Reason.BOMB, f"{self.size} bytes hold more than {self.rows} rows")


def row_groups(path: Path) -> list[int]:
    """Uncompressed bytes of each row group; empty if the file cannot be read."""
    try:
        with bounded(0), open_parquet(path) as file:
            return [file.metadata.row_group(index).total_byte_size for index in range(file.metadata.num_row_groups)]
    except (*UNREADABLE, MemoryError):
        return []  # the reader tells


def read_parquet(
    path: Path, start: int, end: int | None, wanted: Container[str], max_row_bytes: int, limits: Limits
) -> Iterator[Record]:
    """Rows of the row groups [start, end); their places are row numbers in the file. A class label (`ClassLabel`)
    becomes the name of its class, where the file's metadata has it.

    :param wanted: columns to read, in small letters.
    """
    try:
        # With a buffer a column comes page by page, without one whole.
        with bounded(max_row_bytes):
            file = open_parquet(path, memory_map=False, pre_buffer=False, buffer_size=STEP)
            schema = file.schema_arrow
            classes = class_names(schema)
            columns = [name for name in schema.names if name.strip().lower() in wanted]  # a name may be no UTF-8
    except MemoryError:
        yield Fault(0, Reason.MEMORY, too_much("its metadata", max_row_bytes), b"")
        return
    except UNREADABLE as error:
        with path.open("rb") as stream:
            yield Fault(0, Reason.BAD_PARQUET, _cause(error), stream.read(HEAD))
        return
    with file:
        if double := twice(columns):
            yield Fault(0, Reason.BAD_PARQUET, double, b"")
            return
        produced = Produced(path.stat().st_size, limits)
        shared = any(shares(field.type) for field in schema if field.name in columns)
        last = file.metadata.num_row_groups if end is None else end
        row = sum(file.metadata.row_group(index).num_rows for index in range(start))
        for index in range(start, last):
            rows = file.metadata.row_group(index).num_rows
            done = 0
            try:
                held = file.metadata.row_group(index).total_byte_size
                limits.check(produced.total + held, produced.size)
                if not columns:
                    names = ", ".join(schema.names)[:100]
                    for left in produced.take(row, rows):
                        for _ in range(left):
                            yield Fault(row + done, Reason.NO_CONTENT, f"fields: {names}", b"")
                            done += 1
                    continue
                # Arrow doubles what it has when a row follows a long one, so long rows come a few at a time; a
                # dictionary comes with each batch anew.
                most = _BATCH if shared else min(_BATCH, max(1, max_row_bytes // 8 * rows // max(1, held)))
                most = min(most, max(1, rows))
                for batch in _batches(file, index, columns, most, max_row_bytes):
                    produced.add(batch.nbytes)
                    for left in produced.take(row + done, batch.num_rows):
                        for record in batch_rows(batch.slice(0, left), row + done, max_row_bytes, produced):
                            done += 1
                            yield record if isinstance(record, Fault) else named(record, classes)
            except TornError as tear:
                yield Fault(row + done, tear.reason, tear.detail, b"")
                return
            except MemoryError:
                what = too_much(f"rows {row + done} to {row + rows - 1}", max_row_bytes)
                yield Fault(row + done, Reason.MEMORY, what, b"")
                return
            except UNREADABLE as error:
                # What is left of this row group is lost; the next one may be sound.
                yield Fault(
                    row + done, Reason.BAD_PARQUET, f"rows {row + done} to {row + rows - 1}: {_cause(error)}", b""
                )
            finally:
                row += rows


def twice(columns: Sequence[str]) -> str | None:
    """What is wrong with columns of which two have one name: a row would hold the last one alone."""
    name = next((name for name, count in Counter(columns).items() if count > 1), None)
    return None if name is None else f"column {name[:60]!r} appears twice"


def _batches(
    file: pq.ParquetFile, group: int, columns: list[str], most: int, max_row_bytes: int
) -> Iterator[pa.RecordBatch]:
    """The batches of a row group, of `most` rows; of few ones from where so many take too much memory.

    :raises MemoryError: if few do as well.
    """
    done = 0
    for rows in (most, min(most, _FEW)):
        skip = done
        batches = iter(())
        try:
            with bounded(max_row_bytes):
                batches = file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
            while True:
                with bounded(max_row_bytes):
                    batch = next(batches, None)
                if batch is None:
                    return
                if skip < batch.num_rows:
                    done += batch.num_rows - skip
                    yield batch.slice(skip) if skip else batch
                skip = max(0, skip - batch.num_rows)
        except MemoryError:
            del batches  # it holds what it has of the next one
            give_back()
            if rows <= _FEW:
                raise


def batch_rows(
    batch: pa.RecordBatch, first: int, max_row_bytes: int, produced: Produced | None = None
) -> Iterator[Found | Fault]:
    """The rows of a batch; one that is too long never becomes objects of Python, and one that cannot is lost alone.

    :param first: the place of its first one.
    :param produced: has the batch's bytes already, and gets what its rows have beyond them: they may share one value.
    :raises MemoryError: if one row takes too much. :raises TornError: if there is too much of them.
    """
    rows: list[dict[str, Any]] | None = None
    parsers = _parsers(batch.schema)
    shared = any(map(shares, batch.schema.types))
    weight = batch.nbytes
    # Exact sizes are only worth their price where a row could be too long.
    if weight <= max_row_bytes:
        with contextlib.suppress(*_OF_ROWS, MemoryError), bounded(max_row_bytes):
            weight = max(weight, expanded(batch)) if shared else weight
            rows = _plain_values(batch).to_pylist() if weight <= max_row_bytes else None
    if rows is None:
        with bounded(max_row_bytes):
            weights = row_sizes(batch) if shared else None
        left = batch.nbytes
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            size = sum(column.nbytes for column in row.columns) if weights is None else int(weights[index])
            size, record = _one(row, size, first + index, max_row_bytes)
            left -= size
            if produced is not None and left < 0:
                produced.add(-left)
                left = 0
            yield record if isinstance(record, Fault) else _parsed(record, parsers)
    else:
        if produced is not None:
            produced.add(weight - batch.nbytes)
        for index, fields in enumerate(rows):
            yield _parsed(Found(first + index, fields, b""), parsers)


_Parse = Callable[[Any], Any]


def _parsers(fields: Iterable[pa.Field]) -> dict[str, _Parse]:
    """What reads the values of those fields that hold JSON text: Arrow's type `arrow.json`, which is Parquet's JSON."""
    return {field.name: parse for field in fields if (parse := _parser(field.type)) is not None}


def _parser(kind: pa.DataType) -> _Parse | None:
    """What reads the JSON texts within the values of a type; None if it has none, or one of several types (a union)."""
    types = pa.types
    if isinstance(kind, pa.JsonType):
        return lambda text: None if text is None else parse_text(text)
    if isinstance(kind, pa.BaseExtensionType):
        return _parser(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _parser(kind.value_type)
    if types.is_struct(kind):
        within = _parsers(kind)
        return (lambda value: value and _with(value, within)) if within else None
    if types.is_map(kind):
        of_key, of_item = (_parser(part) or _same for part in (kind.key_type, kind.item_type))
        pairs = (of_key, of_item) != (_same, _same)
        return (lambda value: value and [(of_key(key), of_item(item)) for key, item in value]) if pairs else None
    if types.is_nested(kind) and not types.is_union(kind):
        of_value = _parser(kind.value_type)
        return None if of_value is None else lambda value: value and list(map(of_value, value))
    return None


def _same(value: Any) -> Any:
    return value


def _with(value: dict[str, Any], parsers: Mapping[str, _Parse]) -> dict[str, Any]:
    return value | {name: parse(value[name]) for name, parse in parsers.items()}


def _parsed(row: Found, parsers: Mapping[str, _Parse]) -> Found | Fault:
    """The row with the values of its JSON texts, as it would be in a file of JSON."""
    if not parsers:
        return row
    made = dict(row.fields)
    for name, parse in parsers.items():
        try:
            made[name] = parse(made[name])
        except RejectError as error:
            return Fault(row.position, error.reason, f"column {name[:_NAME]!r}: {error.detail}", b"")
        except ValueError as error:
            what = f"column {name[:_NAME]!r} is of type JSON and holds none ({error}): write it as text"
            return Fault(row.position, Reason.BAD_JSON, what[:_CAUSE], b"")
    return row._replace(fields=made)


def _one(row: pa.RecordBatch, size: int, place: int, max_row_bytes: int) -> tuple[int, Found | Fault]:
    """The bytes that become objects, and the row."""
    if size > max_row_bytes:
        return 0, Fault(place, Reason.TOO_LARGE, f"{size} bytes", b"")
    try:
        with bounded(max_row_bytes):
            return size, Found(place, _plain_values(row).to_pylist()[0], b"")
    except MemoryError:
        raise
    except UnicodeDecodeError:
        return size, Fault(place, Reason.BAD_ENCODING, "a text is not UTF-8", b"")
    except _OF_ROWS:
        return size, Fault(place, Reason.BAD_TIME, f"column {_lost(row)[:_NAME]!r}", b"")


def _lost(row: pa.RecordBatch) -> str:
    """The column of a row that cannot become an object of Python; empty if each of them can."""
    for at, name in enumerate(row.schema.names):
        try:
            _plain_values(row.select([at])).to_pylist()
        except _OF_ROWS:
            return str(name)
    return ""


def _plain_values(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Values as Python's own can hold them: times cut to microseconds, with a zone in UTC, and floats of 32 bits by
    their shortest text, 0.1 and not 0.10000000149011612. What becomes of others depends on whether pandas and a
    database of zones are installed.

    :raises pa.ArrowInvalid: if microseconds cannot count that far: the number would wrap around to another time.
    """
    before = batch.schema
    for leaf in (_worded, _plain):
        schema = pa.schema([column.with_type(_mapped(column.type, leaf)) for column in before])
        if schema.types != batch.schema.types:
            arrays = [
                array if array.type == kind else array.cast(options=pc.CastOptions(kind, allow_time_truncate=True))
                for array, kind in zip(batch.columns, schema.types, strict=True)
            ]
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return batch


def _worded(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_float32(kind) else kind


def _plain(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_duration(kind):
        return pa.duration("us")
    return pa.float64() if types.is_float32(kind) else kind


def _mapped(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with those of its values that are no structs and no lists replaced."""
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([field.with_type(_mapped(field.type, leaf)) for field in fields])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_mapped(kind.value_type, leaf)))
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_mapped(kind.value_type, leaf)))
    return leaf(kind)


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
