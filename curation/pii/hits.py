"""What a detector reports, and what becomes of reports that overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

#: All kinds, the strictest first: of two hits of one length the stricter names the mask.
KINDS: Final = ("secret", "iban", "card", "national_id", "email", "ip", "phone")

#: A value begins here: behind no letter, digit or underscore, but also behind `\n` as JSON writes it.
START: Final = r"(?:(?<![0-9A-Za-z_])|(?<=\\[nrtbf]))"
END: Final = r"(?![0-9A-Za-z_])"


class Hit(NamedTuple):
    """Characters [start, end) of a text. `value` is what they say, without spaces and case."""

    start: int
    end: int
    kind: str
    value: str


def settle(text: str, hits: Iterable[Hit]) -> list[Hit]:
    """Hits that do not overlap, in order. Those that overlap become one: a secret if one is among them, else of the
    longest one's kind, then the strictest's. Nothing that was found stays, and the hits' order does not matter."""
    ordered = sorted(_whole_escapes(text, hit) for hit in set(hits))
    groups: list[list[Hit]] = []
    end = 0
    for hit in ordered:
        if groups and hit.start < end:
            groups[-1].append(hit)
        else:
            groups.append([hit])
        end = max(end, hit.end)
    return [_one(text, group) for group in groups]


def _one(text: str, group: list[Hit]) -> Hit:
    best = min(group, key=lambda hit: (hit.kind != "secret", hit.start - hit.end, KINDS.index(hit.kind), hit))
    start, end = group[0].start, max(hit.end for hit in group)
    return best if (best.start, best.end) == (start, end) else Hit(start, end, best.kind, text[start:end])


def _whole_escapes(text: str, hit: Hit) -> Hit:
    """A hit never begins inside an escape: of `\\nbob@...` in JSON text the `\\n` stays, or the JSON would break."""
    behind = hit.start
    while behind > max(0, hit.start - 64) and text[behind - 1] == "\\":
        behind -= 1
    if (hit.start - behind) % 2 == 0:
        return hit
    skipped = {"u": 5}.get(text[hit.start], 1 if text[hit.start] in "nrtbf" else 0)
    if not skipped or hit.start + skipped >= hit.end:
        return hit
    return Hit(hit.start + skipped, hit.end, hit.kind, hit.value[skipped:])
