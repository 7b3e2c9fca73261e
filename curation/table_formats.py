"""Folders that are a table with a log: their data files still hold rows that the log has taken out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from dropforge.errors import DataError


class _Format(NamedTuple):
    """:param mark: what the name of a file of its log has. :param export: a command that writes the rows that count."""

    name: str
    mark: re.Pattern[str]
    export: str


_WITH_SPARK: Final = "spark.read.format('{}').load('TABLE').write.parquet('DROP')"
_FORMATS: Final = (
    _Format(
        "Delta",
        re.compile(r"(^|/)_delta_log/"),
        "pyarrow.parquet.write_table(deltalake.DeltaTable('TABLE').to_pyarrow_table(), 'DROP/rows.parquet')",
    ),
    _Format("Iceberg", re.compile(r"(^|/)metadata/[^/]*\.metadata\.json(\.gz)?$"), _WITH_SPARK.format("iceberg")),
    # Its folder is hidden, so many programs that copy a table leave it out: its files' names say when each was written.
    _Format(
        "Hudi",
        re.compile(r"(^|/)\.hoodie/|(^|/)[0-9a-f-]{36}(-\d+)?_\d+-\d+-\d+_\d{14,17}\.parquet$"),
        _WITH_SPARK.format("hudi"),
    ),
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
                    f"it is a table of {form.name} ({name}), whose files may hold rows that its log has taken out",
                    f"Export the rows that it holds now, for example with `{form.export}`",
                )
