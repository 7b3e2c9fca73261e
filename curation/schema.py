"""Which columns the input has, with which types, and where that changed: between files, and since the version before.

Each row's fields are counted by name and JSON type, whatever becomes of the row. Files are compared with those of the
same format alone, because a CSV file knows only text.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from curation.memory import bounded
from curation.nesting import JsonObject
from curation.page import first_of
from curation.parquet_footer import UNREADABLE, open_parquet
from curation.records import Fields, Split

#: Rows by JSON type (null, boolean, number, string, array, object) by column.
Columns = dict[str, dict[str, int]]

#: Names and types that are counted in one part of a file; of more only the number of their values is known.
_MOST: Final = 500
_NAME: Final = 100
_TOLD: Final = 20
#: Lines about columns of which all are kept: names come from outside.
_LINES: Final = 200
_FORMATS: Final = {"jsonl": "JSON", "array": "JSON", "values": "JSON", "csv": "CSV", "parquet": "Parquet"}
_TYPES: Final[dict[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    JsonObject: "object",
}


@dataclass
class Seen:
    """The columns of a part of a file, row by row.

    :param unread: columns that are in the file and are not read, with their type.
    :param more: values in columns beyond those that are counted.
    """

    unread: Mapping[str, str]
    rows: int = 0
    more: int = 0
    counts: dict[tuple[str, type], int] = field(default_factory=dict)

    def add(self, fields: Fields) -> None:
        counts = self.counts
        self.rows += 1
        for name, value in fields.items():
            place = name[:_NAME], type(value)  # a name may be as long as its row
            if place in counts:
                counts[place] += 1
            elif len(counts) < _MOST:
                counts[place] = 1
            else:
                self.more += 1

    def columns(self) -> Columns:
        """Names are cut, and hold no half of a surrogate pair."""
        found: Columns = {}
        counted = [(name, _TYPES.get(kind, "string"), rows) for (name, kind), rows in self.counts.items()]
        counted += [(name, kind, self.rows) for name, kind in self.unread.items() if self.rows]
        for name, kind, rows in counted:
            shown = name[:_NAME].encode("utf-8", "backslashreplace").decode()
            kinds = found.setdefault(shown, {})
            kinds[kind] = kinds.get(kind, 0) + rows
        return found


def unread(split: Split, wanted: Container[str]) -> dict[str, str]:
    """Columns of a Parquet or Arrow file that are not read, with their JSON types: its schema tells.

    :param wanted: columns that are read, in small letters.
    """
    kind = split.format.kind
    if not split.format.is_table or split.format.fault is not None:
        return {}
    try:
        with bounded(0):
            if kind == "parquet":
                with open_parquet(split.path) as file:
                    schema = file.schema_arrow
            else:
                with pa.OSFile(str(split.path)) as source, pa.ipc.open_stream(source) as stream:
                    schema = stream.schema
            others = [column for column in schema if column.name.strip().lower() not in wanted]  # one may be no UTF-8
    except (*UNREADABLE, MemoryError):
        return {}  # the reader tells
    return {column.name[:_NAME]: _json_type(column.type) for column in others[:_MOST]}


def _json_type(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(kind) or types.is_null(kind):
        return "boolean" if types.is_boolean(kind) else "null"
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if types.is_struct(kind):
        return "object"
    nested = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_map)
    return "array" if any(fits(kind) for fits in nested) else "string"


def joined(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Columns:
    """Counts of several parts, added up; names in order."""
    total: Columns = {}
    for part in parts:
        for name, kinds in part.items():
            held = total.setdefault(name, {})
            for kind, rows in kinds.items():
                held[kind] = held.get(kind, 0) + rows
    return {name: dict(sorted(total[name].items())) for name in sorted(total)}


def by_format(files: Iterable[tuple[str, str, Mapping[str, Mapping[str, int]]]]) -> dict[str, Columns]:
    """What a manifest keeps: the columns of each format, the most frequent ones.

    :param files: for each (name, kind of `Format`, its columns).
    """
    grouped: dict[str, list[Mapping[str, Mapping[str, int]]]] = {}
    for _, kind, columns in files:
        grouped.setdefault(_FORMATS.get(kind, kind), []).append(columns)
    return {name: _frequent(joined(parts)) for name, parts in sorted(grouped.items()) if any(parts)}


def _frequent(columns: Columns) -> Columns:
    most = sorted(columns, key=lambda name: (-sum(columns[name].values()), name))[:_MOST]
    return {name: columns[name] for name in sorted(most)}


def changes(
    files: Iterable[tuple[str, str, Mapping[str, Mapping[str, int]]]],
    before: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
) -> list[str]:
    """What differs, a line each: between files of a format, and from the version before; of each the first lines.

    :param files: see `by_format`. :param before: the same of the version before, if there is one.
    """
    held = [file for file in files if file[2]]
    between, since = [], []
    for label, columns in by_format(held).items():
        same = [(name, seen) for name, kind, seen in held if _FORMATS.get(kind, kind) == label]
        # Files by column, found once: a drop may have as many columns as it has files, and more.
        having: dict[str, list[tuple[str, Mapping[str, int]]]] = {column: [] for column in columns}
        for name, seen in same:
            for column in seen.keys() & having.keys():
                having[column].append((name, seen[column]))
        names = [name for name, _ in same]
        for column in columns:
            between += _between(label, column, having[column], names)
        if before and label in before:
            since += _since(label, before[label], columns)
    return [*first_of(between, _LINES, "changes of columns"), *first_of(since, _LINES, "changes of columns")]


def retyped(
    files: Iterable[tuple[str, str, Mapping[str, Mapping[str, int]]]],
    before: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
) -> list[str]:
    """Columns with several types in one format, or with another type than before; the first ones by name.

    :param files, before: see `changes`.
    """
    found = []
    for label, columns in by_format(files).items():
        for column, kinds in columns.items():
            new, old = _types(kinds), _types((before or {}).get(label, {}).get(column, {}))
            if len(new) > 1 or (old and new and old != new):
                found.append(f"{label} column `{column}`")
    return found[:_TOLD]


def known(card: Mapping[str, Any] | None) -> dict[str, Columns] | None:
    """The columns by format that a version's card tells; None if it tells none."""
    try:
        seen: dict[str, Columns] = (card or {})["columns"]["seen"]
        return {label: joined([columns]) for label, columns in seen.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _between(label: str, column: str, having: list[tuple[str, Mapping[str, int]]], files: list[str]) -> list[str]:
    """:param having: files with the column, and how many of their rows have which type. :param files: all of them."""
    lines = []
    kinds = joined({column: held} for _, held in having)[column]
    if len(_types(kinds)) > 1:
        ways = []
        for kind, rows in sorted(kinds.items(), key=lambda item: (-item[1], item[0])):
            if kind == "null":
                continue
            within = [name for name, held in having if kind in held]
            ways.append(f"{kind} in {_rows(rows)} ({_files(within, len(within))})")
        lines.append(f"{label} column `{column}` has several types: {', '.join(ways)}")
    if len(having) < len(files):
        names = {name for name, _ in having}
        missing = (name for name in files if name not in names)
        count = len(files) - len(having)
        few = len(having) <= count
        fewer = f"only in {_files(sorted(names), len(having))}" if few else f"not in {_files(missing, count)}"
        lines.append(f"{label} column `{column}` is {fewer}")
    return lines


def _since(label: str, before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for column in sorted({*before, *now}):
        old, new = _types(before.get(column, {})), _types(now.get(column, {}))
        if column not in before:
            lines.append(f"{label} column `{column}` is new since the version before")
        elif column not in now:
            lines.append(f"{label} column `{column}` is gone since the version before")
        elif old and new and old != new:
            was, became = " or ".join(sorted(old)), " or ".join(sorted(new))
            lines.append(f"{label} column `{column}` was {was} in the version before, and is {became}")
    return lines


def _types(kinds: Mapping[str, int]) -> set[str]:
    """A missing value is no change of type."""
    return set(kinds) - {"null"}


def _files(names: Iterable[str], count: int) -> str:
    return ", ".join(islice(names, 2)) + (f" and {count - 2:,} more files" if count > 2 else "")


def _rows(rows: int) -> str:
    return f"{rows:,} row{'s' if rows > 1 else ''}"
