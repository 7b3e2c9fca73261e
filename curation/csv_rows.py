"""CSV: quoted cells may run over lines, ragged rows are faults, an open quote costs one line."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator

from curation.dialect import said_separator, separator
from curation.reasons import Reason
from curation.records import HEAD, Blank, Fault, Found, Line, Record


class _Feed:
    """Physical lines for csv.reader, remembered until a record is accepted, so that they can be given again."""

    def __init__(self, found: Iterator[Line | Fault], limit: int) -> None:
        self.found, self.limit = found, limit
        self.waiting: deque[Line | Fault] = deque()
        self.taken: list[Line] = []
        self.size = 0

    def __iter__(self) -> _Feed:
        return self

    def peek(self) -> Line | Fault | None:
        if not self.waiting:
            item = next(self.found, None)
            if item is None:
                return None
            self.waiting.append(item)
        return self.waiting[0]

    def pop(self) -> Line | Fault:
        return self.waiting.popleft()

    def __next__(self) -> str:
        item = self.peek()
        # A line that is too long, a tear or the end: an open quote will not be closed any more.
        if item is None or isinstance(item, Fault) or self.size > self.limit:
            raise StopIteration
        self.pop()
        self.taken.append(item)
        self.size += len(item.data) + 1
        return item.data.decode("utf-8", "surrogateescape") + "\n"

    def accept(self) -> list[Line]:
        taken, self.taken, self.size = self.taken, [], 0
        return taken

    def give_back(self) -> Line:
        """Keep the first line as the bad one, and read the others again."""
        first, *rest = self.accept()
        self.waiting.extendleft(reversed(rest))
        return first


def csv_rows(found: Iterator[Line | Fault], limit: int) -> Iterator[Record]:
    """Records of a CSV file; its first line names the columns, if it is not Excel's `sep=;`.

    :param limit: largest record in bytes.
    """
    csv.field_size_limit(2**31 - 1)
    feed = _Feed(found, limit)
    header: list[str] | None = None
    delimiter, said = ",", None
    reader: Iterator[list[str]] | None = None
    while (item := feed.peek()) is not None:
        if isinstance(item, Fault):
            feed.pop()
            yield item
            continue
        if not item.data.strip():
            feed.pop()
            yield Blank(item.data.count(b"\n") + 1)
            continue
        if header is None and said is None and (said := said_separator(item.data)) is not None:
            feed.pop()
            continue
        if header is None:
            delimiter = said or separator(item.data)
        if reader is None:
            reader = csv.reader(feed, delimiter=delimiter, strict=True)
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reader, cause = None, str(error)
            first = feed.give_back()
            reason = Reason.NUL if b"\0" in first.data else Reason.BAD_QUOTES
            yield Fault(first.position, reason, cause[:120], first.data[:HEAD])
            continue
        if cells is None:
            reader = None
            continue
        taken = feed.accept()
        position, head = taken[0].position, b"\n".join(line.data for line in taken)[:HEAD]
        if header is None:
            header = [cell.strip() for cell in cells]
            named = [name for name in header if name]
            if not named or len(set(named)) != len(named) or any(_is_broken(cell) for cell in header):
                yield Fault(position, Reason.BAD_HEADER, "column names repeat or are not UTF-8", head)
                return
            continue
        yield _csv_row(header, cells, position, head)


def _csv_row(header: list[str], cells: list[str], position: int, head: bytes) -> Record:
    if any(_is_broken(cell) for cell in cells):
        return Fault(position, Reason.BAD_ENCODING, "a cell is not UTF-8", head)
    if len(cells) != len(header):
        # Programs leave empty cells at the end of a row away, or add some.
        least = max(at for at, name in enumerate(header, 1) if name)
        if len(cells) < least or any(cells[len(header) :]):
            return Fault(position, Reason.RAGGED, f"{len(cells)} cells under {len(header)} columns", head)
    fields = {name: cell for name, cell in zip(header, cells, strict=False) if cell != ""}
    if "" in fields and header.count("") > 1:
        return Fault(position, Reason.RAGGED, "a value in a column without a name", head)
    return Found(position, fields, head)


def _is_broken(text: str) -> bool:
    """Did the text come from bytes that are not UTF-8?"""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
