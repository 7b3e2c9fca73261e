"""CSV: quoted cells may run over lines, ragged rows are faults, an open quote costs one line."""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple

from curation.canonical import PAIRS
from curation.dialect import (
    Quotes,
    has_escaped_quotes,
    is_quoted,
    is_rule,
    is_spaced,
    said_separator,
    separator,
    stands_in_quotes,
    stands_in_single_quotes,
)
from curation.header_lines import Further, further_line
from curation.open_quotes import SIGHT, Unclosed, is_ragged
from curation.reasons import Reason
from curation.records import HEAD, Blank, Fault, Found, Line, Record


class _Feed:
    """Physical lines for csv.reader, remembered until a record is accepted, so that they can be given again."""

    def __init__(self, found: Iterator[Line | Fault], limit: int) -> None:
        self.found, self.limit = found, limit
        self.waiting: deque[Line | Fault] = deque()
        self.taken: list[Line] = []
        self.size = 0
        #: Where the last line is that an open quote was followed to in vain, where it ends, and why it was given up.
        self.tried: tuple[int, int, str] = (-1, -1, "")
        self.doomed = False

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

    def ahead(self) -> Iterator[Line]:
        """Lines behind those that were taken, as many as one record may hold: they are only looked at."""
        size = 0
        for item in chain(self.waiting, self._more()):
            if isinstance(item, Fault) or size > self.limit:
                return
            yield item
            size += len(item.data) + 1

    def _more(self) -> Iterator[Line | Fault]:
        for item in self.found:
            self.waiting.append(item)
            yield item

    def __next__(self) -> str:
        item = self.peek()
        # A line that is too long, a tear or the end: an open quote will not be closed any more.
        if item is None or isinstance(item, Fault) or self.size > self.limit:
            raise StopIteration
        if len(self.taken) == 1 and self._leads_nowhere(item):
            self.doomed = True
            raise StopIteration
        self.pop()
        self.taken.append(item)
        self.size += len(item.data) + 1
        return item.data.decode("utf-8", "surrogateescape") + "\n"

    def _leads_nowhere(self, line: Line) -> bool:
        """Whether a record that is open at a line has been followed from there before, and in vain.

        Between lines an open quote is all that csv.reader remembers, so it would come to the same end: each line of a
        file may have such a quote. One that was given up for its size may still be closed, if it began further on.
        """
        last, end, _ = self.tried
        return line.position <= last and (end < 0 or end - self.taken[0].position > self.limit // 2)

    def accept(self) -> list[Line]:
        taken, self.taken, self.size = self.taken, [], 0
        return taken

    def give_back(self, cause: str) -> tuple[Line, str]:
        """Keep the first line as the bad one, and read the others again.

        :returns: the line, and why it is bad: for what is not followed a second time, what was found at the first.
        """
        cause = self.tried[2] if self.doomed else cause
        self.doomed = False
        too_long = self.size > self.limit
        first, *rest = self.accept()
        if rest and rest[-1].position > self.tried[0]:
            self.tried = rest[-1].position, rest[-1].position + len(rest[-1].data) if too_long else -1, cause
        self.waiting.extendleft(reversed(rest))
        return first, cause


def csv_rows(found: Iterator[Line | Fault], limit: int, quotes: Quotes) -> Iterator[Record]:
    """Records of a CSV file; its first line names the columns, if it is not Excel's `sep=;`.

    :param limit: largest record in bytes. :param quotes: how they are read; it counts.
    """
    csv.field_size_limit(2**31 - 1)
    feed, seen = _Feed(found, limit), quotes.seen
    unclosed = Unclosed(quotes, feed.ahead)
    header: _Header | None = None
    delimiter, said, quoted, spaced, named = ",", None, True, False, False
    further: Further = ""
    before_quote, last, longest = b"", 0, 0
    known: frozenset[str] = frozenset()
    reader: Iterator[list[str]] | None = None
    rest = _Rest()
    while (item := feed.peek()) is not None:
        if isinstance(item, Fault):
            feed.pop()
            yield from unclosed.flush()
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
            quoted = is_quoted(quotes.asked, item.data, delimiter)
            spaced = quoted and is_spaced(item.data, delimiter)
            before_quote = delimiter.encode() + b' "'
        if reader is None:
            reader = csv.reader(
                feed,
                delimiter=delimiter,
                strict=True,
                quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
                skipinitialspace=spaced,
            )
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reader = None
            escaped = any(b'\\"' in line.data for line in feed.taken)
            first, cause = feed.give_back(str(error))
            if header is not None and _separated_otherwise(header, first.data):
                yield from unclosed.end()
                yield Fault(first.position, Reason.BAD_HEADER, _OTHER_MARKS, first.data[:HEAD])
                return
            reason = Reason.NUL if b"\0" in first.data else Reason.BAD_QUOTES
            rest_of = 0
            if reason == Reason.BAD_QUOTES and escaped:
                cause = 'a quote within a cell is written \\", not "" (Spark: option escape=\'"\')'
                rest_of = rest.until(first, feed.ahead())
            elif reason == Reason.BAD_QUOTES and cause.startswith(_RETURN):
                cause = "a carriage return is in a cell without quotes: write the cell in quotes, or without it"
            elif reason == Reason.BAD_QUOTES and not first.ended and cause == _OPEN:
                reason, cause = Reason.TORN_FILE, "the file ends inside a cell in quotes"
            yield from unclosed.flush()
            yield Fault(first.position, reason, cause[:120], first.data[:HEAD])
            for _ in range(rest_of):
                line = feed.pop()
                assert isinstance(line, Line)
                blank = Blank(line.data.count(b"\n") + 1)
                yield Fault(line.position, Reason.RAGGED, _REST, line.data[:HEAD]) if line.data.strip() else blank
            continue
        if cells is None:
            reader = None
            continue
        taken = feed.accept()
        position, data, _ = taken[0]
        head = (data if len(taken) == 1 else b"\n".join(line.data for line in taken))[:HEAD]
        if header is None:
            made = _header(cells, position, head)
            if isinstance(made, Fault):
                yield made
                return
            header, named = made, True
            unclosed = Unclosed(quotes, feed.ahead, delimiter, partial(_fits, header))
            last, longest, known = header.least - 1, header.longest, header.known
            continue
        # One cell tells of nearly all rows that they are no names of columns.
        if named or (len(cells) > last and len(cells[last]) <= longest and cells[last].strip().lower() in known):
            rule, again, below = named and is_rule(cells), header.again(cells), feed.peek()
            following = below.data if isinstance(below, Line) else b""
            further = further_line(cells, following, delimiter, further) if named else ""
            topmost, named = named, again == header.folded or further != ""
            if named or rule:
                seen["further" if further else "names"] += 1
                continue
            seen["alike"] += topmost and len(cells) > 1 and len(set(cells)) == 1 and not _NUMBER.fullmatch(cells[0])
            if again:
                yield from unclosed.end()
                yield Fault(position, Reason.BAD_HEADER, "the names of columns come again in another order", head)
                return
        if cells and cells[0] in _ASKED and _names_others(cells) and _fits(header, cells):
            yield from unclosed.end()
            cause = "the names of other columns: another table begins, as where files are joined"
            yield Fault(position, Reason.BAD_HEADER, cause, head)
            return
        if len(taken) > 1:
            seen["spread"] += 1
            ended = any(line.data.endswith(b"\\") for line in taken[:-1])
            seen["escaped"] += ended or (not _hold_json(cells) and any(_ESCAPED.search(line.data) for line in taken))
        elif b"\\" in data:
            seen["escaped"] += (_ESCAPED.search(data) is not None and not _hold_json(cells)) or (
                _QUOTE.search(data) is not None and any(map(has_escaped_quotes, cells))
            )
        if cells and (cells[0][:1] == "'" or cells[-1][-1:] == "'"):  # one tells, where all texts are quoted so
            seen["single"] += any(map(stands_in_single_quotes, cells))
        record = _csv_row(header, cells, position, head, ascii=len(taken) == 1 and data.isascii())
        if len(cells) == 1 and isinstance(record, Fault) and _separated_otherwise(header, data):
            yield from unclosed.end()
            yield Fault(position, Reason.BAD_HEADER, _OTHER_MARKS, head)
            return
        if not taken[-1].ended:
            if isinstance(record, Fault) and record.reason == Reason.RAGGED and len(cells) < header.least:
                record = record._replace(reason=Reason.TORN_FILE, detail="the file ends within a row")
            seen["unended"] += isinstance(record, Found)
        if len(taken) == 1 and data[-1:] == b"\\" and _goes_on(data):
            if parts := _parts(header, cells, feed.ahead(), partial(_cells, delimiter=delimiter, quoted=quoted)):
                yield from unclosed.flush()
                yield Fault(position, Reason.RAGGED, _BREAK, head)
                for _ in range(parts):
                    line = feed.pop()
                    assert isinstance(line, Line)
                    yield Fault(line.position, Reason.RAGGED, _BREAK_REST, line.data[:HEAD])
                continue
            seen["escaped"] += _ESCAPED.search(data) is None or _hold_json(cells)  # else it is counted
        if quoted:
            if not spaced and before_quote in data:
                seen["spaced"] += any(cell[:1] == " " and cell.lstrip()[:1] == '"' for cell in cells)
            yield record
            continue
        if b'"' in data:
            seen["quoted"] += any(map(stands_in_quotes, cells))
            yield from unclosed.take(record, cells, taken[0])
        elif position <= unclosed.until or unclosed.waiting:
            yield from unclosed.take(record, cells, taken[0])
        else:
            yield record
    yield from unclosed.end()


#: With what a line of other names begins, and the pairs of which it has both.
_TABLES: Final = (*PAIRS, ("text", "label"))
_ASKED: Final = frozenset(name for first, _ in _TABLES for name in (first, first.capitalize(), first.upper()))


def _names_others(cells: Sequence[str]) -> bool:
    there = {cell.strip().lower() for cell in cells}
    return any(there.issuperset(pair) for pair in _TABLES)


_OTHER_MARKS: Final = "the names of columns come again between other separators, as where files are joined"


def _separated_otherwise(header: _Header, data: bytes) -> bool:
    """Whether a line of one cell has the names of the columns between other separators."""
    text = data.decode("utf-8", "replace").replace('"', "")
    return any(mark in text and header.again(text.split(mark)) for mark in ",;\t|")


_BREAK: Final = (
    "a line break within a cell is written as a backslash and a break (MySQL, Redshift, Snowflake): export with quotes"
)
_BREAK_REST: Final = "a part of the record above, whose line breaks are written as a backslash and a break"


def _goes_on(data: bytes) -> bool:
    """Whether a line ends with a backslash that escapes its break."""
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


def _cells(data: bytes, delimiter: str, *, quoted: bool) -> list[str]:
    """The cells of a line alone; none if a quote is open."""
    reader = csv.reader(
        [data.decode("utf-8", "surrogateescape")],
        delimiter=delimiter,
        strict=True,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
    )
    try:
        return next(reader, [])
    except csv.Error:
        return []


def _parts(header: _Header, cells: list[str], ahead: Iterator[Line], read: Callable[[bytes], list[str]]) -> int:
    """How many lines behind one that ends with a backslash are parts of its record: with them it has as many cells as
    the header, and some line of them has not. 0 if none, as where a path ends with a backslash.
    """
    whole, apart = list(cells), _fits(header, cells)
    for count, line in enumerate(islice(ahead, SIGHT), 1):
        if not (more := read(line.data)):
            return 0
        apart &= _fits(header, more)
        whole[-1:] = [f"{whole[-1]}\n{more[0]}", *more[1:]]
        if not _goes_on(line.data):
            return 0 if apart or not _fits(header, whole) else count
    return 0


class _Rest:
    """Lines of a record that was given up for its quotes, which a program wrote `\\"`."""

    def __init__(self) -> None:
        #: Up to where no such record ended.
        self.looked = -1

    def until(self, first: Line, ahead: Iterator[Line]) -> int:
        """How many lines behind the first one are parts of the record; 0 if it does not end within sight."""
        if first.position < self.looked or _odd(first.data) == 0:
            return 0
        for count, line in enumerate(islice(ahead, SIGHT), 1):
            if _odd(line.data):  # the quote that the first line opens, less those that other cells open and close
                return count
            self.looked = line.position
        return 0


_REST: Final = 'a part of the record above, whose quotes are written \\"'


def _odd(data: bytes) -> int:
    """Whether a line opens or closes a cell: 1 if its quotes without a backslash are odd."""
    return _BACKSLASHED.sub(b"", data).count(b'"') % 2


_BACKSLASHED: Final = re.compile(rb"\\.", re.DOTALL)


class _Header(NamedTuple):
    """Names of columns, how many cells a row has at least, and how many columns have no name.

    :param folded: the names as they are compared. :param known: them. :param longest: characters of one.
    """

    columns: list[str]
    least: int
    nameless: int
    folded: list[str]
    known: frozenset[str]
    longest: int

    def again(self, cells: list[str]) -> list[str]:
        """The names of columns as they are compared, where cells are these in any order; empty for any others."""
        names = _names(cells)
        return names if sorted(names) == sorted(self.folded) else []


def _header(cells: list[str], position: int, head: bytes) -> _Header | Fault:
    columns = [cell.strip() for cell in cells]
    named = [name for name in columns if name]
    if not named or len(set(named)) != len(named) or any(_is_broken(cell) for cell in columns):
        double = next((name for name, count in Counter(named).items() if count > 1), None)
        cause = f"column {double[:60]!r} appears twice" if double else "column names repeat or are not UTF-8"
        return Fault(position, Reason.BAD_HEADER, cause, head)
    least = max(at for at, name in enumerate(columns, 1) if name)
    folded = _names(cells)
    known = frozenset(folded) - {""}
    return _Header(columns, least, columns.count(""), folded, known, max(map(len, cells)))


def _names(cells: list[str]) -> list[str]:
    """Names of columns as they are compared."""
    folded = [cell.strip().lower() for cell in cells]
    while folded and not folded[-1]:
        folded.pop()
    return folded


#: What `csv` says of a cell whose quote is not closed.
_OPEN: Final = "unexpected end of data"
#: And of a carriage return that no line feed follows.
_RETURN: Final = "new-line character seen in unquoted field"
#: Characters of a column's name that are told.
_NAMED: Final = 60
_NUMBER: Final = re.compile(r"\s*|[-+.,\d\s]+|true|false", re.IGNORECASE)
_ESCAPED: Final = re.compile(rb"\\[ntr\\]")
#: A quotation mark behind a backslash, which is not one that CSV doubles.
_QUOTE: Final = re.compile(rb'\\"(?!")')


def _hold_json(cells: Sequence[str]) -> bool:
    """Whether a cell is JSON, whose escapes are read where it is."""
    return any(cell[:1] in {"[", "{"} and cell[-1:] in {"]", "}"} for cell in cells)


def _csv_row(header: _Header, cells: list[str], position: int, head: bytes, *, ascii: bool = False) -> Found | Fault:
    """The row that cells are. :param ascii: whether all are known to be ASCII."""
    columns, least, nameless, _, _, _ = header
    if not ascii and any(map(_is_broken, cells)):
        return Fault(position, Reason.BAD_ENCODING, "a cell is not UTF-8", head)
    # Programs leave empty cells at the end of a row away, or add some.
    if len(cells) != len(columns) and (len(cells) < least or any(cells[len(columns) :])):
        alone = f" ({columns[0][:_NAMED]!r}): the first line is to name all" if len(columns) == 1 else "s"
        escaped = any(cell[-1:] == "\\" for cell in cells)
        mend = "; one ends with a backslash: if that is an escape, write cells in quotes without any" if escaped else ""
        return Fault(position, Reason.RAGGED, f"{len(cells)} cells under {len(columns)} column{alone}{mend}", head)
    fields = {name: cell for name, cell in zip(columns, cells, strict=False) if cell and cell != _NULL}
    if "" in fields and nameless > 1:
        return Fault(position, Reason.RAGGED, "a value in a column without a name", head)
    return Found(position, fields, head)


def _fits(header: _Header, cells: list[str]) -> bool:
    """Tell whether a row has as many cells as it may."""
    return not is_ragged(_csv_row(header, cells, 0, b""))


#: What Hive, MySQL and PostgreSQL write for a missing value.
_NULL: Final = "\\N"


def _is_broken(text: str) -> bool:
    """Did the text come from bytes that are not UTF-8?"""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
