"""Tables whose quotes are characters: rows that are parts of a cell of a program whose quotes quote.

`curation.csv_rows` gives it each row that has a quote, and those behind one that may be such a part.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final

from curation.dialect import Quotes, closes, is_bare, opens
from curation.reasons import Reason
from curation.records import Fault, Found, Line, Record


class Unclosed:
    """Rows of a file without quotes, of which those are no rows that are parts of a cell that runs over lines.

    A record that is one if quotes quote is such a cell where its lines or the rest of the file say so; a row whose last
    cell opens a quote that nothing closes is held, for the next line may be ragged.

    :param ahead: the lines behind the one that is taken, each time anew. :param mark: what separates cells.
    :param fits: tells whether a row has as many cells as it may.
    """

    def __init__(
        self,
        quotes: Quotes,
        ahead: Callable[[], Iterator[Line]],
        mark: str = ",",
        fits: Callable[[list[str]], bool] = bool,
    ) -> None:
        self.quotes, self.ahead, self.mark, self.fits = quotes, ahead, mark, fits
        #: Where the last line is of a record that runs over lines if quotes quote, and whether these are no rows.
        self.until, self.parts = -1, False
        #: Such records that are parts, others, and whether a cell has a quote as none has in a file whose quotes quote.
        self.spread, self.perhaps, self.unlike = 0, 0, False
        #: A row whose last cell opens a quote, and whether the line before was such a part.
        self.held: Found | Fault | None = None
        self.inside = False

    def take(self, record: Found | Fault, cells: list[str], line: Line) -> Iterator[Record]:
        """:param record: what a line became. :param cells: of it."""
        if line.position > self.until and self.quotes.asked != "never":
            self._look(line, cells)
        if self.parts and line.position <= self.until:
            yield from self.flush()
            self.inside = False
            yield self._part(record)
            return
        ragged = is_ragged(record)
        begins = opens(cells[-1])
        # Of a line that is not ragged the first cell may be the rest of one.
        part = self.waiting or begins if ragged else self.inside and closes(cells[0])
        if ragged and self.held is not None:
            self.held = self._part(self.held)
        yield from self.flush()
        self.inside = part and ((ragged and not closes(cells[0])) or (begins and len(cells) > 1))
        if begins and not part:
            self.held = record
        else:
            yield self._part(record) if part else record

    @property
    def waiting(self) -> bool:
        """Whether the next line says what the one before is."""
        return self.inside or self.held is not None

    def flush(self) -> Iterator[Record]:
        if self.held is not None:
            yield self.held
            self.held = None

    def end(self) -> Iterator[Record]:
        """What is held at the end of the file, where it is also known whether a cell is unlike those in quotes."""
        yield from self.flush()
        if not self.unlike:
            self.quotes.seen["perhaps"] += self.perhaps

    def _part(self, record: Found | Fault) -> Fault:
        self.quotes.seen["open"] += 1
        detail = "a cell opens a quote and runs over lines: `data.quotes: always` reads it"
        return Fault(record.position, Reason.RAGGED, detail, record.head)

    def _look(self, line: Line, cells: list[str]) -> None:
        """Whether a record begins that runs over lines, how far it goes, and whether its lines are no rows."""
        if not any(map(opens, cells)):
            self.unlike = self.unlike or any(map(is_bare, cells))
            return
        found = self._over_lines(chain([line], self.ahead()))
        if found is None:
            self.unlike = True
            return
        lines, quoted = found
        bare = [one for one in lines if one.data.strip()]
        ragged = sum(not self.fits(_cells(one, self.mark)) for one in bare)
        self.until = lines[-1].position
        # Quotes are doubled where they quote, and parts of a text seldom have as many cells as a row.
        self.parts = 2 * ragged >= len(bare) or any("\n" in cell and '"' in cell for cell in quoted)
        if not self.parts and not self.unlike:
            spread = self.spread if self.spread > 1 else self._in_sight(line)
            indented = any(one.data.startswith(self.mark.encode()) for one in lines[1:])
            self.parts = spread > 1 or (spread > 0 and (ragged > 0 or indented))
            self.spread = max(self.spread, spread - 1)
        self.spread += self.parts
        self.perhaps += not self.parts

    def _in_sight(self, line: Line) -> int:
        """How many records run over lines from one on, if quotes quote; 0 if a cell tells that they do not."""
        lines, found = chain([line], self.ahead()), 0
        for number, one in enumerate(lines):
            if number == SIGHT:
                break
            if b'"' not in one.data:
                continue
            cells = _cells(one, self.mark)
            if not any(map(opens, cells)):
                self.unlike = any(map(is_bare, cells))
            elif self._over_lines(chain([one], lines)) is None:
                self.unlike = True
            else:
                found += 1
            if self.unlike:
                return 0
        return found

    def _over_lines(self, lines: Iterable[Line]) -> tuple[list[Line], list[str]] | None:
        """The lines of the record that the first of some begins if quotes quote, and its cells; None if it is none."""
        taken: list[Line] = []

        def texts() -> Iterator[str]:
            for line in lines:
                taken.append(line)
                yield line.data.decode("utf-8", "surrogateescape") + "\n"

        try:
            cells = next(csv.reader(texts(), delimiter=self.mark, strict=True), [])
        except csv.Error:
            return None
        return (taken, cells) if self.fits(cells) else None


#: Lines of a file that are looked at to tell whether its quotes quote.
SIGHT: Final = 1_000


def _cells(line: Line, mark: str) -> list[str]:
    return line.data.decode("utf-8", "surrogateescape").rstrip("\r").split(mark)


def is_ragged(record: Found | Fault) -> bool:
    """Tell whether a row has too few or too many cells."""
    return isinstance(record, Fault) and record.reason == Reason.RAGGED
