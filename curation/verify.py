"""`curation: none`: rows that are said to be clean are taken as they are, if every one of them can be used."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet as pq

from curation.kernel import Report, Task
from curation.reasons import mend
from dropforge.errors import DataError


def verify(reports: Sequence[tuple[Task, Report]]) -> None:
    """:raises DataError: for the first row that cannot be used, with its file and place."""
    bad = [task for task, report in reports if report.faults]
    if not bad:
        return
    file = min(task.file for task in bad)
    here = [task for task in bad if task.file == file]
    faults = (fault for task in here for fault in pq.read_table(task.faults).to_pylist())
    fault = min(faults, key=lambda fault: int(fault["position"]))
    place = "row" if here[0].split.format.kind in {"parquet", "arrow"} else "byte"
    rows = sum(report.faults for _, report in reports)
    raise DataError(
        f"file {here[0].name!r}, {place} {fault['position']}",
        f"{fault['reason']}: {fault['detail']}, and {rows - 1:,} more rows cannot be used"
        if rows > 1
        else f"{fault['reason']}: {fault['detail']}",
        f"{mend(fault['reason'])}; or leave `curation: none` out, and bad rows are quarantined",
    )
