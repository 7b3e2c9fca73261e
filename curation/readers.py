"""Rows of a file, each with its place: one `Found` per input row, whether it can be used or not.

A reader never raises for what a file holds. Places are byte offsets of the decompressed file, row numbers in Parquet
and Arrow. Blank lines are no rows; they are counted.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from typing import Any, BinaryIO, Final

from curation.arrow import read_arrow
from curation.canonical import FIELDS
from curation.csv_rows import csv_rows
from curation.dialect import Quotes
from curation.encodings import Fallback, narrowed
from curation.formats import Format
from curation.lines import lines
from curation.nesting import check_depth, too_deep, unique
from curation.parquet import read_parquet
from curation.reasons import Reason, RejectError
from curation.records import HEAD, Blank, Fault, Fields, Found, Line, Record, Split
from curation.shapes import holds_rows, no_object
from curation.streams import DEFAULT_LIMITS, STEP, Limits, chunks
from curation.values import torn_value, values


def read(
    split: Split,
    *,
    max_row_bytes: int,
    text_column: str = "text",
    wanted: Container[str] = FIELDS | {"text"},
    limits: Limits = DEFAULT_LIMITS,
    fallback: Fallback | None = None,
    quotes: Quotes | None = None,
) -> Iterator[Record]:
    """All records of a split, in the order of their places.

    :param text_column: what paragraphs of plain text are called.
    :param wanted: columns of Parquet and Arrow files that are read, in small letters.
    :param fallback: what lines that are not UTF-8 are read as; it counts them.
    :param quotes: how those of CSV and TSV are read; it counts them.
    """
    records = _read(split, max_row_bytes, text_column, wanted, limits, fallback, quotes or Quotes())
    return records if split.rows is None else _first(records, split.rows)


def _first(records: Iterator[Record], most: int) -> Iterator[Record]:
    for record in records:
        if not isinstance(record, Blank):
            if not most:
                return
            most -= 1
        yield record


def _read(
    split: Split,
    max_row_bytes: int,
    text_column: str,
    wanted: Container[str],
    limits: Limits,
    fallback: Fallback | None,
    quotes: Quotes,
) -> Iterator[Record]:
    kind = split.format.kind
    if split.format.fault is not None:
        reason, detail = split.format.fault
        with split.path.open("rb") as stream:
            yield Fault(0, reason, detail, stream.read(HEAD))
        return
    if kind == "parquet":
        yield from read_parquet(split.path, split.start, split.end, wanted, max_row_bytes, limits)
        return
    if kind == "arrow":
        yield from read_arrow(split.path, wanted, max_row_bytes, limits)
        return
    size = split.path.stat().st_size
    with split.path.open("rb") as stream:
        start = split.start
        if start:
            start = _next_line(stream, start, split.end if split.end is not None else size)
            if split.end is not None and start >= split.end:
                return
        pieces = text_pieces(stream, split.format, size, limits)
        if kind in {"array", "values"}:
            found = values(pieces, max_row_bytes, array=kind == "array")
        else:
            found = lines(pieces, max_row_bytes, start, split.end)
        if fallback is not None and split.format.wide is None:
            found = fallback.over(found)
        if kind == "csv":
            records = csv_rows(found, max_row_bytes, quotes)
        elif kind == "text":
            records = _paragraphs(found, text_column, max_row_bytes)
        else:
            records = _json_rows(found)
        yield from records if split.format.compression == "none" else _bounded(records, size, limits)


def text_pieces(stream: BinaryIO, format: Format, size: int, limits: Limits) -> Iterator[bytes]:
    """Bytes of a file that is no table, decompressed and as UTF-8, by whose offsets its rows are named.

    :param size: the file's compressed size in bytes. :raises TornError: where it cannot be followed any more.
    """
    pieces = chunks(stream, format.compression, size, limits)
    return pieces if format.wide is None else narrowed(pieces, format.wide)


def _bounded(records: Iterator[Record], size: int, limits: Limits) -> Iterator[Record]:
    """Records of a file of `size` compressed bytes, up to where there are too many."""
    most = max(limits.rows, size)
    for number, record in enumerate(records):
        if number >= most and not isinstance(record, Blank):
            yield Fault(record.position, Reason.BOMB, f"{size} bytes hold more than {most} rows", b"")
            return
        yield record


def _next_line(stream: Any, start: int, end: int) -> int:
    """Go to the first line that begins at or after `start`; returns its offset, or one at or after `end`.

    Beyond `end` it is another split's: within one long line each would read to where it ends.
    """
    stream.seek(start - 1)
    offset = start - 1
    while offset < end and (piece := stream.read(STEP)):
        at = piece.find(b"\n")
        if at >= 0:
            stream.seek(offset + at + 1)
            return int(offset + at + 1)
        offset += len(piece)
    return int(offset)


def _no_constant(text: str) -> Any:
    raise RejectError(Reason.BAD_NUMBER, f"{text} is no JSON number")


_decoder: Final = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_no_constant)


def _decoded(text: str) -> Any:
    if text[:1] == "{":  # as most rows begin: `decode` looks for white space before and behind, with some overhead
        value, end = _decoder.raw_decode(text)
        if end == len(text) or not text[end:].strip(" \t\r\n"):
            return value
    return _decoder.decode(text)


def parse_json(data: bytes) -> Fields:
    """One JSON row, strictly. :raises RejectError: with the reason."""
    try:
        row = _decoded(data.decode())
    except UnicodeDecodeError as error:
        raise RejectError(Reason.BAD_ENCODING, f"byte {error.start} of the row is not UTF-8") from None
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        if b"\0" in data:
            raise RejectError(Reason.NUL, "a NUL byte in the row") from None
        raise RejectError(Reason.BAD_JSON, str(error)[:120]) from None
    check_depth(row, data.count(b"{") + data.count(b"["))
    if not isinstance(row, dict):
        raise RejectError(Reason.MANY_ROWS if holds_rows(row) else Reason.NOT_AN_OBJECT, no_object(row))
    return row


def _json_rows(found: Iterator[Line | Fault]) -> Iterator[Record]:
    for item in found:
        if isinstance(item, Fault):
            yield item
            continue
        position, data, ended = item
        try:
            fields = parse_json(data)
        except RejectError as error:
            if not ended and data[:1] == b"{" and error.reason in _CUT and (torn := torn_value(data)) is not None:
                yield torn._replace(position=position)
            elif data.strip():
                yield Fault(position, error.reason, error.detail, data[:HEAD])
            else:
                yield Blank(data.count(b"\n") + 1)
        else:
            yield Found(position, fields, data[:HEAD])


#: What may be wrong with a row because its end is missing.
_CUT: Final = frozenset({Reason.BAD_JSON, Reason.BAD_ENCODING})


def _paragraphs(found: Iterator[Line | Fault], text_column: str, limit: int) -> Iterator[Record]:
    """Text: one row per paragraph, that is, per run of lines that are not blank."""
    held: list[bytes] = []
    start = size = 0

    def paragraph() -> Iterator[Record]:
        if held:
            data = b"\n".join(held)
            held.clear()
            if len(data) > limit:
                yield Fault(start, Reason.TOO_LARGE, f"{size} bytes", data[:HEAD])
                return
            try:
                yield Found(start, {text_column: data.decode()}, data[:HEAD])
            except UnicodeDecodeError as error:
                detail = f"byte {error.start} of the paragraph is not UTF-8"
                yield Fault(start, Reason.BAD_ENCODING, detail, data[:HEAD])

    for item in found:
        if isinstance(item, Fault):
            yield from paragraph()
            yield item
            size = 0
            continue
        data = item.data.removesuffix(b"\r")
        if not data.strip():
            yield from paragraph()
            size = 0
            continue
        if not held and not size:
            start = item.position
        # Beyond the limit only the size grows; what is held is already too long to pass.
        if size <= limit:
            held.append(data)
        size += len(data) + 1
    yield from paragraph()
