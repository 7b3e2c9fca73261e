"""Open a stranger's Parquet file: the one way to do it, because a footer can end the process that reads it.

pyarrow follows a schema by recursion, and some thousands of levels overflow the stack. So lists of the footer may be
only so long that no schema in them is that deep. Of a footer with a longer one the levels are counted first, without
recursion; it is in Thrift's compact protocol (https://github.com/apache/thrift/blob/master/doc/specs).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dropforge.json_objects import DEEPEST

#: What it may raise to open, read and unfold a stranger's table, besides `MemoryError`, which is a kind of its own.
#: Arrow's dates, times and zones are more than Python's (`OverflowError`, `KeyError`).
UNREADABLE: Final = (pa.ArrowException, ArithmeticError, LookupError, OSError, RecursionError, ValueError)
#: Entries of a list in a footer that pyarrow reads unseen: half as many levels as its stack holds.
_UNSEEN: Final = 4_000
_LONGEST: Final = 64 << 20  # bytes of a footer whose levels are counted
_LONGEST_READ: Final = 1 << 20  # and of one whose columns are looked at, in about a second
_TAIL: Final = 8  # length and mark
_MARK: Final = b"PAR1"  # at both ends of a file
_PIECE: Final = 1 << 20
_BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_BOOLEANS: Final = (1, 2)  # a field's value is its type
_FIXED: Final = {**dict.fromkeys((*_BOOLEANS, _BYTE), 1), _DOUBLE: 8}  # bytes of what is always as long
_I32, _I64, _LIST = 5, 6, 9
_SCHEMA, _CHILDREN = 2, 5  # fields of FileMetaData and of SchemaElement
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3  # of FileMetaData, RowGroup and ColumnChunk
_REQUIRED: Final = frozenset({1, 2, 3, 4})  # fields of FileMetaData
_COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11  # of ColumnMetaData


def open_parquet(path: Path, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file whose columns are nested no more than `DEEPEST` deep.

    :param options: of `pq.ParquetFile`.
    :raises pa.ArrowException, OSError, ValueError, MemoryError: if it cannot be read, or is nested deeper.
    """
    try:
        file = pq.ParquetFile(path, thrift_container_size_limit=_UNSEEN, **options)
    except OSError as error:
        if "size limit" not in str(error):
            raise
        held = path.stat()
        if _counted(path, held.st_size, held.st_mtime_ns) > DEEPEST:
            raise _too_deep() from None
        file = pq.ParquetFile(path, **options)
    if _deeper(file.schema_arrow.types):
        file.close()
        raise _too_deep()
    held = path.stat()
    if _is_joined(path, held.st_size, held.st_mtime_ns):
        file.close()
        raise pa.ArrowInvalid("it is several files one behind the other, and only the last one's rows are listed")
    return file


@lru_cache(64)
def _is_joined(path: Path, size: int, _changed: int) -> bool:
    """Whether one file stands behind another, as `cat` joins them: its footer has the places of its own pages."""
    both = _MARK + _MARK
    with path.open("rb") as stream:
        stream.seek(max(0, size - _TAIL))
        length = int.from_bytes(stream.read(4), "little")
        if length > min(_LONGEST_READ, size - _TAIL):
            return False
        stream.seek(end := size - _TAIL - length)
        try:
            begin = pages_end(stream.read(length))
        except IndexError:  # pyarrow knows more of Thrift
            return False
        place, looked_at = max(0, begin - len(_MARK)), 0
        while end - place >= len(both):  # pieces overlap, as the marks may lie between two
            stream.seek(place)
            piece = stream.read(min(_PIECE, end - place))
            for found in re.finditer(both, piece):
                if (footer := _footer_before(stream, place + found.start())) is None:
                    continue
                looked_at += len(footer)
                if looked_at > _LONGEST_READ or _is_footer(footer):  # no writer makes so many that are none
                    return True
            place += max(1, len(piece) - len(both) + 1)
    return False


def _footer_before(stream: BinaryIO, mark: int) -> bytes | None:
    """What stands before a mark where a file may end, as long as is said there."""
    stream.seek(max(0, mark - len(_MARK)))
    length = int.from_bytes(stream.read(4), "little")
    if not 0 < length <= min(_LONGEST_READ, mark - _TAIL):
        return None
    stream.seek(mark - 4 - length)
    return stream.read(length)


def _is_footer(found: bytes) -> bool:
    """Whether it is one: statistics and bloom filters between pages and footer may hold the marks too."""
    compact, seen = _Compact(found), set[int]()
    with suppress(IndexError):
        for field, kind in compact.fields():
            seen.add(field)
            compact.skip(kind)
        return seen >= _REQUIRED and compact.at == len(found)
    return False


def _too_deep() -> pa.ArrowInvalid:
    return pa.ArrowInvalid(f"its columns are nested more than {DEEPEST} deep")


def _deeper(level: list[pa.DataType]) -> bool:
    """Whether types are nested too deeply, level by level."""
    for _ in range(DEEPEST):
        plain = [kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind for kind in level]
        level = [kind.field(at).type for kind in plain for at in range(kind.num_fields)]
        if not level:
            return False
    return True


@lru_cache(64)
def _counted(path: Path, size: int, _changed: int) -> int:
    """The levels of a file's schema. :raises pa.ArrowInvalid: if its footer cannot be followed."""
    with path.open("rb") as stream:
        stream.seek(max(0, size - _TAIL))
        length = int.from_bytes(stream.read(4), "little")
        if length > min(_LONGEST, size - _TAIL):
            raise pa.ArrowInvalid(f"its footer has {length} bytes")
        stream.seek(size - _TAIL - length)
        footer = stream.read(length)
    try:
        return levels(footer)
    except IndexError:
        raise pa.ArrowInvalid("its footer ends in the middle") from None


def pages_end(footer: bytes) -> int:
    """Where the pages of the last row group end, by what a footer says of its columns; as long as the mark without any.

    Not by pyarrow, which a footer ends with its process when it looks at a column whose statistics contradict.

    :raises IndexError: if the footer ends too early.
    """
    compact = _Compact(footer)
    ends = [0]
    for field, kind in compact.fields():
        if (field, kind) == (_ROW_GROUPS, _LIST):
            ends += [_group_end(compact) for _ in range(compact.items()[0])]
        else:
            compact.skip(kind)
    return max(len(_MARK), ends[-1])


def _group_end(compact: _Compact) -> int:
    """Where the pages of a row group end."""
    ends = [0]
    for field, kind in compact.fields():
        if (field, kind) == (_COLUMNS, _LIST):
            ends += [_column_end(compact) for _ in range(compact.items()[0])]
        else:
            compact.skip(kind)
    return max(ends)


def _column_end(compact: _Compact) -> int:
    """Where the pages of a column chunk end; 0 if that is not said."""
    found = dict.fromkeys((_COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE), 0)
    for field, kind in compact.fields():
        if (field, kind) != (_META_DATA, _STRUCT):
            compact.skip(kind)
            continue
        for name, inner in compact.fields():
            if name in found and inner == _I64:
                found[name] = compact.signed(64)
            else:
                compact.skip(inner)
    return (found[_DICTIONARY_PAGE] or found[_DATA_PAGE]) + found[_COMPRESSED]


def levels(footer: bytes) -> int:
    """How deeply the schema in a footer is nested. :raises IndexError: if that ends too early."""
    compact = _Compact(footer)
    deepest = 0
    for field, kind in compact.fields():
        if (field, kind) == (_SCHEMA, _LIST):
            deepest = max(deepest, _levels(compact))
        else:
            compact.skip(kind)
    return deepest


def _levels(compact: _Compact) -> int:
    """The same of a list of the schema's elements, each before those within it."""
    deepest = 0
    left: list[int] = []  # elements still to come, of each level
    for _ in range(compact.items()[0]):
        children = _children(compact)
        while left and not left[-1]:
            left.pop()
        if left:
            left[-1] -= 1
        if children > 0:
            left.append(children)
            deepest = max(deepest, len(left))
    return deepest


def _children(compact: _Compact) -> int:
    children = 0
    for field, kind in compact.fields():
        if (field, kind) == (_CHILDREN, _I32):
            children = compact.signed()
        else:
            compact.skip(kind)
    return children


class _Compact:
    """Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        found = shift = 0
        while True:
            byte = self.byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found
            if shift > 63:
                raise IndexError("no number is so long")

    def fields(self) -> Iterator[tuple[int, int]]:
        """The numbers and types of a struct's fields; whoever takes one reads its value, or skips it."""
        field = 0
        while header := self.byte():
            field = self.field(field, header)
            yield field, header & 15

    def signed(self, bits: int = 32) -> int:
        """A number of 32 bits, or of as many."""
        found = self.varint() & ((1 << bits) - 1)
        return (found >> 1) ^ -(found & 1)

    def field(self, before: int, header: int) -> int:
        """The number of a field. :param before: that of the one before it."""
        return before + (header >> 4) if header >> 4 else self.signed()

    def items(self) -> tuple[int, int]:
        """How many a list has, and of which type."""
        header = self.byte()
        return self.varint() if header >> 4 == 15 else header >> 4, header & 15

    def skip(self, kind: int) -> None:
        """Pass over a value. :raises IndexError: if it has a type that there is not."""
        left = [] if kind in _BOOLEANS else [(kind, 0, 1)]  # of each a kind, that of a map's values, and how many
        while left:
            if self.at > len(self.data):
                raise IndexError("it ends too early")
            kind, value, count = left.pop()
            if count > 1 and (value or kind not in _FIXED):
                left.append((kind, value, count - 1))
            if value:
                left += [(value, 0, 1), (kind, 0, 1)]
            elif kind in _FIXED:
                self.at += count * _FIXED[kind]
            elif kind in _INTEGERS:
                self.varint()
            elif kind == _BINARY:
                length = self.varint()
                self.at += length
            elif kind in _LISTS:
                size, inner = self.items()
                left += [(inner, 0, size)] if size else []
            elif kind == _MAP:
                if size := self.varint():
                    kinds = self.byte()
                    left.append((kinds >> 4, kinds & 15, size))
            elif kind == _STRUCT:
                if header := self.byte():
                    self.field(0, header)
                    left.append((_STRUCT, 0, 1))
                    left += [] if header & 15 in _BOOLEANS else [(header & 15, 0, 1)]
            else:
                raise IndexError(f"no type {kind}")
