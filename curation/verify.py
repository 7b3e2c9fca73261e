"""`curation: none`: rows that are said to be clean are taken as they are, if every one of them can be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from curation.reasons import Filtered, mend
from curation.task import Report, Task
from dropforge.errors import DataError


def verify(reports: Sequence[tuple[Task, Report]]) -> None:
    """:raises DataError: for the first row that cannot be used, with its file and place."""
    faulty = ((task, _faults(task)) for task, report in reports if report.faults)
    bad = [(task, fault) for task, faults in faulty for fault in faults]
    if not bad:
        return
    task, fault = min(bad, key=lambda pair: (pair[0].file, int(pair[1]["position"])))
    place = "row" if task.split.format.is_table else "byte"
    rows = len(bad)
    raise DataError(
        f"file {task.name!r}, {place} {fault['position']}",
        f"{fault['reason']}: {fault['detail']}, and {rows - 1:,} more rows cannot be used"
        if rows > 1
        else f"{fault['reason']}: {fault['detail']}",
        f"{mend(fault['reason'])}; or leave `curation: none` out, and bad rows are quarantined",
    )


def _faults(task: Task) -> list[dict[str, Any]]:
    """Rows that ended; what `dropforge forget` took out is none."""
    return [fault for fault in pq.read_table(task.faults).to_pylist() if fault["reason"] != Filtered.FORGOTTEN]
