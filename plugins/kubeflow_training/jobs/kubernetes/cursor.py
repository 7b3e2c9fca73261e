"""Where one has come in a pod's log: which of its lines are new, and whether lines between are missing. Pure.

The API gives lines since a whole second, so every reading repeats some. The last line that was taken, its anchor, is
looked for by time stamp and count; what stands behind it is new. If the anchor does not come back, the node has rotated
or removed the file, and lines may be missing. Time stamps may run backwards by a little between stdout and stderr.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

_STAMP: Final = re.compile(r"([\dT:-]{19})(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_SECOND: Final = 10**9
_PENDING: Final = 1 << 18  # bytes held back while the anchor is looked for


@dataclass
class Batch:
    """
    :param lines: new lines without their stamps.
    :param marks: for each line, stamp (nanoseconds since 1970) and which of that stamp it is.
    :param gap: stamps between which lines may be missing, found before the first of these lines.
    """

    lines: list[str] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    gap: tuple[int, int] | None = None


class Lines:
    """Blocks of bytes as lines. What is too long is cut into pieces with its stamp on each: the same at every reading.

    :param longest: bytes of a piece.
    """

    def __init__(self, longest: int) -> None:
        self._longest, self._rest = longest, b""

    def take(self, block: bytes) -> list[str]:
        *lines, self._rest = (self._rest + block).split(b"\n")
        found = [piece for line in lines for piece in self._cut(line)]
        if len(self._rest) > self._longest:
            *pieces, self._rest = self._cut(self._rest)
            found += pieces
        return [piece.decode(errors="replace") for piece in found]

    def rest(self) -> list[str]:
        """The last line, which has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []

    def _cut(self, line: bytes) -> list[bytes]:
        stamp = line[:64].partition(b" ")[0]
        again = stamp + b" " if nanoseconds(stamp.decode(errors="replace")) is not None else b""
        pieces = []
        while len(line) > self._longest:
            pieces.append(line[: self._longest])
            line = again + line[self._longest :]
        return [*pieces, line]


class Cursor:
    """
    :param at, seen: stamp of the anchor, and how many lines of that stamp were taken; 0 before the first line.
    """

    def __init__(self, at: int = 0, seen: int = 0) -> None:
        self.at, self.seen = at, seen
        self._looking = at > 0
        self._met = 0
        self._held: list[tuple[int, str]] = []
        self._held_bytes = 0

    def begin(self) -> None:
        """A new reading begins, from `since` on."""
        self._looking, self._met, self._held, self._held_bytes = self.at > 0, 0, [], 0

    @property
    def since(self) -> str | None:
        """What to ask the API for: the second of the anchor."""
        return instant(self.at - self.at % _SECOND) if self.at else None

    @property
    def looking(self) -> bool:
        """Whether the anchor has not come back yet."""
        return self._looking

    @property
    def holding(self) -> bool:
        """Whether lines are held back until the anchor comes, or is given up."""
        return bool(self._held)

    def take(self, raw: Iterable[str]) -> Batch:
        """Lines of the API, with their stamps; those that are new."""
        batch = Batch()
        for line in raw:
            stamp, _, text = line.partition(" ")
            when = nanoseconds(stamp)
            if when is None:
                # The API's own words: told where they stand, and no line to come back to.
                if not self._looking:
                    batch.lines.append(line)
                    batch.marks.append((self.at, self.seen))
                continue
            if not self._looking:
                self._put(batch, when, text)
                continue
            if when == self.at:
                self._met += 1
                if self._met >= self.seen:
                    self._looking, self._held = False, []
                continue
            if when < self.at:
                continue
            self._held.append((when, text))
            self._held_bytes += len(text)
            if when > self.at + _SECOND or self._held_bytes > _PENDING:
                self._give_up(batch)
        return batch

    def end(self) -> Batch:
        """The reading ended, or brings nothing for now: what was held back is new, and the anchor is missing."""
        batch = Batch()
        if self._looking and self._held:
            self._give_up(batch)
        return batch

    def _give_up(self, batch: Batch) -> None:
        batch.gap = (self.at, self._held[0][0])
        held, self._held, self._looking = self._held, [], False
        for when, text in held:
            self._put(batch, when, text)

    def _put(self, batch: Batch, when: int, text: str) -> None:
        if when == self.at:
            self.seen += 1
        else:
            self.at, self.seen = when, 1
        batch.lines.append(text)
        batch.marks.append((self.at, self.seen))

    @classmethod
    def of(cls, position: Mapping[str, Any] | None) -> Cursor:
        known = position or {}
        try:
            return cls(int(known.get("at") or 0), int(known.get("seen") or 0))
        except (TypeError, ValueError):
            return cls()


_seconds: tuple[str, str, int] = ("", "", 0)


def nanoseconds(stamp: str) -> int | None:
    """An RFC 3339 time stamp with up to nine digits of fraction as nanoseconds since 1970; None if it is none."""
    global _seconds
    prefix, zone, known = _seconds
    if stamp[:19] == prefix and stamp.endswith(zone) and zone:
        fraction = stamp[20 : len(stamp) - len(zone)]
        if not fraction and len(stamp) == 19 + len(zone):
            return known
        if stamp[19] == "." and fraction.isdecimal() and len(fraction) <= 9:
            return known + int(fraction.ljust(9, "0"))
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    try:
        seconds = int(datetime.fromisoformat(match[1] + match[3]).timestamp()) * _SECOND
    except ValueError:
        return None
    _seconds = (match[1], match[3], seconds)
    return seconds + int((match[2] or "0").ljust(9, "0"))


def instant(at: int) -> str:
    """Nanoseconds since 1970 as RFC 3339 in UTC."""
    text = datetime.fromtimestamp(at // _SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = at % _SECOND
    return f"{text}.{fraction:09d}Z" if fraction else f"{text}Z"
