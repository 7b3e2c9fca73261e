"""What the values of a column become: of a value that many rows share, its size in each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: Bytes of each value: floating-point numbers, which lists of lists of shared values cannot overflow.
Sizes = npt.NDArray[np.float64]


def shares(kind: pa.DataType) -> bool:
    """Whether values of a type, or of one within it, may be one in memory: `nbytes` says little of them then."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return shares(kind.storage_type)
    if any(is_kind(kind) for is_kind in (types.is_dictionary, types.is_run_end_encoded, types.is_union)):
        return True
    if any(is_kind(kind) for is_kind in (types.is_string_view, types.is_binary_view)):
        return True
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return True
    return types.is_nested(kind) and any(shares(kind.field(at).type) for at in range(kind.num_fields))


def expanded(batch: pa.RecordBatch) -> int:
    """The bytes of a batch whose rows share values."""
    return sum(_total(column) if shares(column.type) else column.nbytes for column in batch.columns)


def _total(column: pa.Array) -> int:
    if isinstance(column, pa.DictionaryArray) and _has_lengths(column.dictionary.type):  # what most are, quickly
        return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    return int(sizes(column).sum())


def row_sizes(batch: pa.RecordBatch) -> Sizes:
    """The bytes of each row of a batch."""
    return _sum([sizes(column) for column in batch.columns], batch.num_rows)


def sizes(column: pa.Array) -> Sizes:
    """The bytes of each value, however many share one; about what they are in a plain column."""
    kind, types = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        return sizes(column.storage)
    if isinstance(column, pa.DictionaryArray):
        return _at(sizes(column.dictionary), _numbers(column.indices))
    if isinstance(column, pa.RunEndEncodedArray):
        ends = _numbers(column.run_ends)
        places = np.searchsorted(ends, np.arange(column.offset, column.offset + len(column)), side="right")
        return _at(sizes(column.values), places)
    if isinstance(column, (pa.StringViewArray, pa.BinaryViewArray)):
        return _of_views(column)
    if isinstance(column, pa.StructArray):
        return _sum([sizes(column.field(at)) for at in range(kind.num_fields)], len(column))
    if isinstance(column, pa.UnionArray):
        return _of_union(column)
    if isinstance(column, pa.MapArray):
        return _within(sizes(column.keys) + sizes(column.items), _numbers(column.offsets))
    if isinstance(column, (pa.ListArray, pa.LargeListArray)):
        return _within(sizes(column.values), _numbers(column.offsets))
    if isinstance(column, (pa.ListViewArray, pa.LargeListViewArray)):
        starts = _numbers(column.offsets)
        return _within(sizes(column.values), starts, starts + _numbers(column.sizes))
    if isinstance(column, pa.FixedSizeListArray):
        starts = (np.arange(len(column) + 1) + column.offset) * kind.list_size
        return _within(sizes(column.values), starts)
    if _has_lengths(kind):
        return np.maximum(_numbers(pc.binary_length(column)), 0).astype(np.float64)
    return np.full(len(column), kind.byte_width if types.is_fixed_size_binary(kind) else 8.0)


def _has_lengths(kind: pa.DataType) -> bool:
    types = pa.types
    known = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    return any(is_kind(kind) for is_kind in known)


def _numbers(column: pa.Array) -> npt.NDArray[np.int64]:
    """Whole numbers, with -1 for what is absent."""
    whole = pc.fill_null(column.cast(pa.int64()), -1)
    found: npt.NDArray[np.int64] = whole.to_numpy(zero_copy_only=False)
    return found


def _at(found: Sizes, places: npt.NDArray[np.int64]) -> Sizes:
    """The sizes at places; nothing for -1."""
    return np.append(found, 0.0)[places]


def _within(found: Sizes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64] | None = None) -> Sizes:
    """The sizes of lists, 8 bytes for each value besides; where they end, or else where the next one begins."""
    before = np.concatenate(([0.0], np.cumsum(found + 8)))
    return before[starts[1:] if ends is None else ends] - before[starts[:-1] if ends is None else starts]


def _sum(parts: list[Sizes], rows: int) -> Sizes:
    return np.sum(parts, axis=0) if parts else np.zeros(rows)


def _of_views(column: pa.Array) -> Sizes:
    """A view of 16 bytes begins with its length."""
    if not len(column):
        return np.zeros(0)
    views = np.frombuffer(column.buffers()[1], np.int32)[::4][column.offset : column.offset + len(column)]
    there = column.is_valid().to_numpy(zero_copy_only=False)
    return np.where(there, views, 0).astype(np.float64)


def _of_union(column: Any) -> Sizes:
    """No less than it is: the longest value that any of its kinds has."""
    longest = max((sizes(column.field(at)).max(initial=0) for at in range(column.type.num_fields)), default=0)
    return np.full(len(column), longest)
