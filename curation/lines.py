"""Lines of a byte stream with their offsets, in bounded memory however long a line is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from curation.formats import BOM
from curation.reasons import Reason
from curation.records import HEAD, Fault, Line
from curation.streams import STEP, TornError


def lines(pieces: Iterator[bytes], limit: int, start: int = 0, end: int | None = None) -> Iterator[Line | Fault]:
    """Split a stream at line feeds, and at nothing else (U+2028 and lone carriage returns stay inside).

    A line longer than `limit` bytes becomes one `Fault`, and so does everything behind a tear. A byte order mark at
    offset 0 is skipped, and before any other line, where files were joined. Blank lines come many at a time: a small
    file can expand to millions of them.

    :param start: offset of the stream's first byte.
    :param end: stop before the first line that begins at or after this offset.
    """
    position, offset = start, start  # of the current line's first byte; of the next byte to arrive
    held: list[bytes] = []
    size = 0
    skipping = False
    blank = re.compile(rb"\s{0,%d}\n" % min(limit, STEP))  # so that no line in it is longer than the limit
    try:
        for piece in pieces:
            at = 0
            if offset == 0 and piece.startswith(BOM):
                at = position = len(BOM)
            while (stop := piece.find(b"\n", at)) >= 0:
                if piece[at] <= 0x20 and not size and (run := blank.match(piece, at)):
                    stop = run.end() - 1
                    if end is not None and offset + stop >= end:
                        stop = piece.find(b"\n", end - offset - 1)
                size += stop - at
                if size > limit:
                    head = b"".join(held) + piece[at : min(stop, at + HEAD)]
                    yield Fault(position, Reason.TOO_LARGE, f"{size} bytes", head[:HEAD])
                elif held:
                    held.append(piece[at:stop])
                    yield Line(position, b"".join(held).removeprefix(BOM))
                else:
                    yield Line(position, piece[at:stop].removeprefix(BOM))
                held, size, skipping = [], 0, False
                at = stop + 1
                position = offset + at
                if end is not None and position >= end:
                    return
            rest = len(piece) - at
            size += rest
            offset += len(piece)
            if rest:
                held.append(piece[at : at + HEAD] if skipping else piece[at:])
                if size > limit:
                    # Only the head is kept of a line that is too long already.
                    held, skipping = [b"".join(held)[:HEAD]], True
    except TornError as tear:
        yield Fault(position, tear.reason, tear.detail, b"".join(held)[:HEAD])
        return
    if size > limit:
        yield Fault(position, Reason.TOO_LARGE, f"{size} bytes", b"".join(held)[:HEAD])
    elif size:
        yield Line(position, b"".join(held).removeprefix(BOM), ended=False)
