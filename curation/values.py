"""JSON values one after another, or the elements of one JSON array, cut out of a stream without parsing it.

Only brackets and strings are followed, so a value whose inside is wrong is still one value and its neighbours survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from curation.formats import BOM
from curation.reasons import Reason
from curation.records import HEAD, Fault, Line
from curation.streams import TornError

_OUTSIDE: Final = re.compile(rb'["{}\[\],]')
_INSIDE: Final = re.compile(rb'["\\]')
_BLANK: Final = b" \t\r\n"
_DEEPEST: Final = 1 << 20


class _Scanner:
    """Where we are in the text; pieces may end anywhere."""

    def __init__(self, array: bool, limit: int) -> None:
        self.floor = 1 if array else 0
        self.limit = limit
        self.depth = 0
        self.in_string = self.escaped = self.closed = False
        self.held = bytearray()
        self.size = 0
        self.position = 0

    def feed(self, piece: bytes, offset: int) -> Iterator[Line | Fault]:
        at = 0
        while at < len(piece):
            if self.escaped:
                self._keep(piece, at, at + 1, offset)
                self.escaped = False
                at += 1
                continue
            found = (_INSIDE if self.in_string else _OUTSIDE).search(piece, at)
            if found is None:
                self._keep(piece, at, len(piece), offset)
                return
            stop = found.start()
            mark = piece[stop]
            if self.in_string:
                self._keep(piece, at, stop + 1, offset)
                self.in_string, self.escaped = mark != 0x22, mark == 0x5C
            elif mark == 0x22:
                self._keep(piece, at, stop + 1, offset)
                self.in_string = True
            elif mark in b"{[":
                if self.depth == 0 and self.floor:
                    self._keep(piece, at, stop, offset)
                    if self.closed:
                        self._keep(piece, stop, stop + 1, offset)
                    else:
                        yield from self._flush()
                    self.depth = 1
                else:
                    self._keep(piece, at, stop + 1, offset)
                    self.depth = min(self.depth + 1, _DEEPEST)
            elif mark in b"}]":
                if self.depth > self.floor:
                    self._keep(piece, at, stop + 1, offset)
                    self.depth -= 1
                    if self.depth == 0:
                        yield from self._flush()
                else:
                    # The array's end; among loose values, a bracket too many is a (bad) value of its own.
                    self._keep(piece, at, stop if self.floor else stop + 1, offset)
                    yield from self._flush()
                    self.depth, self.closed = 0, True
            elif self.depth == self.floor and self.floor:
                self._keep(piece, at, stop, offset)
                yield from self._flush()
            else:
                self._keep(piece, at, stop + 1, offset)
            at = stop + 1

    def finish(self, offset: int) -> Iterator[Line | Fault]:
        open_array = self.floor and not self.closed
        if open_array or self.depth or self.in_string:
            if self.size:
                cause = "the file ends inside this value; if brackets do not match, later rows are part of it"
                yield Fault(self.position, Reason.TORN_FILE, cause, bytes(self.held[:HEAD]))
            elif open_array:
                yield Fault(offset, Reason.TORN_FILE, "the array has no end", b"")
        else:
            yield from self._flush()

    def _keep(self, piece: bytes, start: int, stop: int, offset: int) -> None:
        if not self.size:
            # A value begins with its first byte that is not blank.
            while start < stop and piece[start] in _BLANK:
                start += 1
            self.position = offset + start
        if start < stop:
            self.size += stop - start
            room = (self.limit if self.size <= self.limit else HEAD) - len(self.held)
            if room > 0:
                self.held += piece[start : min(stop, start + room)]
            elif self.size > self.limit and len(self.held) > HEAD:
                del self.held[HEAD:]

    def _flush(self) -> Iterator[Line | Fault]:
        if self.size > self.limit:
            yield Fault(self.position, Reason.TOO_LARGE, f"{self.size} bytes", bytes(self.held[:HEAD]))
        elif self.size and self.held.strip(_BLANK):
            yield Line(self.position, bytes(self.held).rstrip(_BLANK))
        self.held.clear()
        self.size = 0


def values(pieces: Iterator[bytes], limit: int, *, array: bool) -> Iterator[Line | Fault]:
    """Values with the offset of their first byte.

    :param array: the stream is one array of rows; else rows follow each other.
    :param limit: largest value in bytes.
    """
    scanner = _Scanner(array, limit)
    offset = 0
    try:
        for piece in pieces:
            body = piece
            if offset == 0 and piece.startswith(BOM):
                body, offset = piece[len(BOM) :], len(BOM)
            yield from scanner.feed(body, offset)
            offset += len(body)
    except TornError as tear:
        at = scanner.position if scanner.size else offset
        yield Fault(at, tear.reason, tear.detail, bytes(scanner.held[:HEAD]))
        return
    yield from scanner.finish(offset)


def torn_value(data: bytes) -> Fault | None:
    """The fault of a text that ends inside a value; None for any other."""
    faults = [item for item in values(iter([data]), len(data), array=False) if isinstance(item, Fault)]
    return next((fault for fault in faults if fault.reason == Reason.TORN_FILE), None)
