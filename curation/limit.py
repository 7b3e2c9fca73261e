"""The first rows of a drop, for smoke runs: which files are fetched, and how many rows of each are read.

Rows are counted in the order of the files' names (bytes of UTF-8) and of their places, before they are shared out to
workers, so neither these nor the order of an upload have a say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from curation.documents import may_be_text, plain_texts
from curation.formats import sniff
from curation.kernel import Canonical, canonical_rows
from curation.plan import fetch
from curation.records import Split
from curation.streams import Limits
from curation.task import Report, Rules, Task
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError
from dropforge.store import Store


class Taken(NamedTuple):
    """Files that are read, from the first one on: local copies, and of each the rows to read; None is all.

    :param texts: names of those that are passed over, as plain text beside tables.
    """

    files: list[DropFile]
    paths: list[Path]
    most: list[int | None]
    texts: list[str]


def first(
    store: Store,
    drop: Drop,
    files: list[DropFile],
    rules: Rules,
    folder: Path,
    progress: Callable[[int, int], None],
    limits: Limits,
) -> Taken:
    """Fetch files until the limit of the rules is reached, each one whole, because its checksum is that of the whole.

    :raises DataError: if an object is gone or is not what the drop promised, or no row is within the limit.
    """
    asked = rules.text_files == "auto"
    perhaps = {file.key for file in files if asked and file.size and may_be_text(file.key)}
    tables = len(perhaps) < sum(file.size > 0 for file in files)
    if rules.limit_rows is None and rules.limit_bytes is None:
        found = dict(zip((file.key for file in files), fetch(store, drop, files, folder, progress), strict=True))
        texts = plain_texts({key: sniff(found[key], key, rules.encoding) for key in sorted(perhaps)}, tables)
        passed = set(texts)
        files = [file for file in files if file.key not in passed]
        return Taken(files, [found[file.key] for file in files], [None] * len(files), texts)
    taken = Taken([], [], [], [])
    used = _Used(rules.limit_rows, rules.limit_bytes)
    for number, file in enumerate(files):
        if used.full:
            break
        path = fetch(store, drop, [file], folder, progress)[0]
        split = Split(path, sniff(path, file.key, rules.encoding))
        # Of files that are not fetched the names alone say whether they are tables.
        if tables and file.key in perhaps and plain_texts({file.key: split.format}, tables):
            taken.texts.append(file.key)
            continue
        rows = used.take(Task("limit", split, number, file.key, rules, folder, limits)) if file.size else None
        if rows == 0:
            break
        taken.files.append(file)
        taken.paths.append(path)
        taken.most.append(rows)
    if files and not taken.paths:
        raise DataError(f"file {file.key!r}", "its first row has more text than `data.limit_bytes`", "Raise it")
    return taken


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
