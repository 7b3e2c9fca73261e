"""Places of rows: the ledger has a text file's by the offset of their first byte, and people by the line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from curation.formats import Format
from curation.readers import text_pieces
from curation.records import Split
from curation.streams import DEFAULT_LIMITS, Limits, TornError


def has_lines(format: Format) -> bool:
    """Whether a file can be read as lines at all."""
    return not format.is_table and format.fault is None


def line_numbers(
    path: Path, format: Format, positions: Iterable[int], limits: Limits = DEFAULT_LIMITS
) -> dict[int, int]:
    """Return the line, from 1, that each offset (decompressed) lies in; nothing for tables and behind a tear."""
    wanted, found = sorted(set(positions), reverse=True), dict[int, int]()
    if not has_lines(format):
        return found
    line = offset = 0
    for piece in _pieces(path, format, limits):
        start = 0
        while wanted and wanted[-1] < offset + len(piece):
            stop = wanted[-1] - offset
            line += piece.count(b"\n", start, stop)
            start = stop
            found[wanted.pop()] = line + 1
        if not wanted:
            break
        line += piece.count(b"\n", start)
        offset += len(piece)
    return found


def bounds(path: Path, format: Format, line: int) -> tuple[int, int] | None:
    """Return the offsets at which a line of a text file, from 1, begins and ends; None if it has fewer."""
    offset, left, begin = 0, line - 1, 0 if line == 1 else None
    for piece in _pieces(path, format, DEFAULT_LIMITS):
        at = 0
        if begin is None:
            count = piece.count(b"\n")
            if count < left:
                left, offset = left - count, offset + len(piece)
                continue
            for _ in range(left):
                at = piece.index(b"\n", at) + 1
            begin = offset + at
        if (stop := piece.find(b"\n", at)) >= 0:
            return begin, offset + stop + 1
        offset += len(piece)
    return (begin, offset) if begin is not None and begin < offset else None


def _pieces(path: Path, format: Format, limits: Limits) -> Iterator[bytes]:
    with suppress(TornError), path.open("rb") as stream:
        yield from text_pieces(stream, format, path.stat().st_size, limits)


def add_lines(card: Any, files: Mapping[str, Split], limits: Limits) -> None:
    """Give each place on a card its `line`, where it lies in a text file that is here.

    :param files: a split of each, by their names on the card.
    """
    places: dict[str, list[dict[str, Any]]] = {}
    for item in _places(card):
        places.setdefault(item["file"], []).append(item)
    for file, items in places.items():
        if (split := files.get(file)) is None:
            continue  # of an earlier drop
        found = line_numbers(split.path, split.format, (item["position"] for item in items), limits)
        for item in items:
            if (line := found.get(item["position"])) is not None:
                item["line"] = line


def _places(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("file"), str) and isinstance(value.get("position"), int):
            yield value
        for part in value.values():
            yield from _places(part)
    elif isinstance(value, list):
        for part in value:
            yield from _places(part)
