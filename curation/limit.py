"""The first rows of a drop, for smoke runs: which files are fetched, and how many rows of each are read.

Rows are counted in the order of the files' names (bytes of UTF-8) and of their places, before they are shared out to
workers, so neither these nor the order of an upload have a say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from curation.formats import sniff
from curation.kernel import Canonical, canonical_rows
from curation.plan import fetch
from curation.records import Split
from curation.streams import Limits
from curation.task import Report, Rules, Task
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError
from dropforge.store import Store


def first(
    store: Store,
    drop: Drop,
    files: list[DropFile],
    rules: Rules,
    folder: Path,
    progress: Callable[[int, int], None],
    limits: Limits,
) -> tuple[list[Path], list[int | None]]:
    """Fetch files until the limit of the rules is reached, each one whole, because its checksum is that of the whole.

    :return: local copies of the files that are read, from the first one on, and of each the rows to read; None is all.
    :raises DataError: if an object is gone or is not what the drop promised, or no row is within the limit.
    """
    if rules.limit_rows is None and rules.limit_bytes is None:
        return fetch(store, drop, files, folder, progress), [None] * len(files)
    paths: list[Path] = []
    most: list[int | None] = []
    used = _Used(rules.limit_rows, rules.limit_bytes)
    for number, file in enumerate(files):
        if used.full:
            break
        path = fetch(store, drop, [file], folder, progress)[0]
        split = Split(path, sniff(path, file.key, rules.encoding))
        rows = used.take(Task("limit", split, number, file.key, rules, folder, limits)) if file.size else None
        if rows == 0:
            break
        paths.append(path)
        most.append(rows)
    if files and not paths:
        raise DataError(f"file {files[0].key!r}", "its first row has more text than `data.limit_bytes`", "Raise it")
    return paths, most


@dataclass
class _Used:
    """What is left of the limit."""

    rows: int | None
    bytes: int | None
    full: bool = False

    def take(self, task: Task) -> int | None:
        """Rows of the file that are within the limit; None if all are."""
        # What is forgotten counts as before, so that no row behind the limit comes in its place.
        as_before = replace(task, rules=replace(task.rules, forgotten=()))
        for taken, item in enumerate(canonical_rows(as_before, Report(task.file))):
            size = _size(item) if isinstance(item, Canonical) else 0
            if self.rows == 0 or (self.bytes is not None and size > self.bytes):
                self.full = True
                return taken
            self.rows = None if self.rows is None else self.rows - 1
            self.bytes = None if self.bytes is None else self.bytes - size
        self.full = self.rows == 0
        return None


def _size(item: Canonical) -> int:
    """Bytes of UTF-8 of the row's texts: the same in any format."""
    row = item.row
    return sum(len(text.encode()) for text in (row.contents if row.text is None else (row.text,)))


def limited(rules: Rules, read: int, files: int) -> list[str]:
    """What the card says of a limit."""
    asked = {"rows": rules.limit_rows, "bytes of text": rules.limit_bytes}
    most = " and ".join(f"{number:,} {what}" for what, number in asked.items() if number is not None)
    return [f"A limit of {most}: {read:,} of {files:,} files were looked at"] if most else []
