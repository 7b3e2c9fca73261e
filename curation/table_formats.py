"""Folders that are a table with a log: their data files still hold rows that the log has taken out, or never took in.

Such a table is refused, or, where its log is a plain list of files, the files that do not count are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from dropforge.errors import DataError
from dropforge.saved import DICT, STATE, shards


class _Format(NamedTuple):
    """:param mark: what the name of a file of its log has. :param export: a command that writes the rows that count."""

    name: str
    mark: re.Pattern[str]
    export: str


_WITH_SPARK: Final = "spark.read.format('{}').load('TABLE').write.parquet('DROP')"
_FORMATS: Final = (
    _Format(
        "Delta",
        re.compile(r"(^|/)_delta_log/|(^|/)deletion_vector_[0-9a-f-]{36}\.bin$"),
        "pyarrow.parquet.write_table(deltalake.DeltaTable('TABLE').to_pyarrow_table(), 'DROP/rows.parquet')",
    ),
    # Where its log was not copied, files that take out rows say that others hold too many.
    _Format(
        "Iceberg",
        re.compile(r"(^|/)metadata/[^/]*\.metadata\.json(\.gz)?$|\.puffin$|-\d{5}-deletes\.(parquet|orc|avro)$"),
        _WITH_SPARK.format("iceberg"),
    ),
    # Its log is in a database, and its files keep their rows until they are cleaned up.
    _Format(
        "DuckLake",
        re.compile(r"(^|/)ducklake-[0-9a-f-]{36}(-delete)?\.parquet$"),
        "COPY (FROM lake.TABLE) TO 'DROP/rows.parquet'",
    ),
    # Its folder is hidden, so many programs that copy a table leave it out: its files' names say when each was written.
    _Format(
        "Hudi",
        re.compile(r"(^|/)\.hoodie/|(^|/)[0-9a-f-]{36}(-\d+)?_\d+-\d+-\d+_\d{14,17}\.parquet$"),
        _WITH_SPARK.format("hudi"),
    ),
    _Format(
        "Hive with transactions",
        re.compile(r"(^|/)(delete_)?delta_\d+_\d+(_\d+)?/"),
        "spark.table('TABLE').write.parquet('DROP')",
    ),
    # It lists the files of batches that have ended; Spark itself reads no others.
    _Format("Spark's streaming", re.compile(r"(^|/)_spark_metadata/"), _WITH_SPARK.format("FORMAT")),
    _Format("Paimon", re.compile(r"(^|/)snapshot/snapshot-\d+$"), _WITH_SPARK.format("paimon")),
    _Format(
        "Lance",
        re.compile(r"(^|/)_versions/[^/]*\.manifest$"),
        "pyarrow.parquet.write_table(lance.dataset('TABLE').to_table(), 'DROP/rows.parquet')",
    ),
)


def check(thing: str, names: Iterable[str]) -> None:
    """Refuse data files that say less than their table's log.

    :param thing: what has them, for messages. :param names: of its files.
    :raises DataError: with what exports the rows that the table holds.
    """
    for name in names:
        for form in _FORMATS:
            if form.mark.search(name):
                raise DataError(
                    thing,
                    f"it is a table of {form.name} ({name}), whose files may hold rows that its log has not",
                    f"Export the rows that it holds now, for example with `{form.export}`",
                )


_COMMIT: Final = re.compile(r"_(started|committed)_(\d+)")
_WRITER: Final = re.compile(r"-tid-(\d+)-")


def superseded(thing: str, names: Iterable[str], read: Callable[[str], bytes]) -> dict[str, str]:
    """Return the files that the list beside them does not count, each with the reason.

    :param thing: what has them, for messages. :param names: of all its files. :param read: gives one's bytes.
    :raises DataError: if a list cannot be read, or names a file that is not there.
    """
    folders: dict[str, dict[str, str]] = {}
    for name in names:
        path = PurePosixPath(name)
        folders.setdefault(str(path.parent), {})[path.name] = name
    found: dict[str, str] = {}
    for folder, within in folders.items():
        if STATE in within and any(name.endswith(".arrow") for name in within):
            place = f"file {within[STATE]!r} of {thing}"
            found |= _stale(place, within, _object(thing, within[STATE], read))
        if DICT in within:
            found |= _stale_splits(folder, folders, _object(thing, within[DICT], read))
        if any(map(_COMMIT.fullmatch, within)):
            found |= _uncommitted(thing, within, read)
    return found


def _stale(thing: str, within: dict[str, str], state: dict[str, Any]) -> dict[str, str]:
    """What a data set that was saved in the same folder before has left behind."""
    counted = set(shards(thing, state, within)) if "_data_files" in state else set(within)
    why = f"`{STATE}` does not name it: another data set was saved there before"
    return {key: why for name, key in within.items() if name.endswith(".arrow") and name not in counted}


def _stale_splits(folder: str, folders: dict[str, dict[str, str]], listed: dict[str, Any]) -> dict[str, str]:
    splits = listed.get("splits")
    if not isinstance(splits, list):
        return {}
    why = f"`{DICT}` does not name its folder: another data set was saved there before"
    return {
        key: why
        for other, within in folders.items()
        if other != folder and str(PurePosixPath(other).parent) == folder
        if STATE in within and PurePosixPath(other).name not in splits
        for name, key in within.items()
        if name.endswith(".arrow")
    }


def _uncommitted(thing: str, within: dict[str, str], read: Callable[[str], bytes]) -> dict[str, str]:
    """Files of writes that Databricks has not ended, and those that a later write has replaced."""
    marks = [match for match in map(_COMMIT.fullmatch, within) if match]
    ended = {mark[2] for mark in marks if mark[1] == "committed"}
    begun = {mark[2] for mark in marks} - ended
    found = {}
    for name, key in within.items():
        if (writer := _WRITER.search(name)) and writer[1] in begun:
            found[key] = f"`_started_{writer[1]}` has no `_committed_{writer[1]}`: its write has not ended"
    for number in sorted(ended):
        mark = f"_committed_{number}"
        removed = _object(thing, within[mark], read).get("removed")
        for name in removed if isinstance(removed, list) else ():
            if isinstance(name, str) and name in within:
                found[within[name]] = f"`{mark}` names it as removed"
    return found


def _object(thing: str, name: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        values = json.loads(read(name))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        cause = "it is no JSON object, and lists which files beside it count"
        raise DataError(f"file {name!r} of {thing}", cause, "Upload it again, or the rows without it")
    return values
