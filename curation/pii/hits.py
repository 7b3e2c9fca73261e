"""What a detector reports, and what becomes of reports that overlap."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

#: All kinds, the strictest first: of two hits of one length the stricter names the mask.
KINDS: Final = ("secret", "iban", "card", "national_id", "email", "ip", "phone")

#: A value begins here: behind no letter, digit or underscore, but also behind `\n` as JSON writes it.
START: Final = r"(?:(?<![0-9A-Za-z_])|(?<=\\[nrtbf]))"
END: Final = r"(?![0-9A-Za-z_])"
_ESCAPE: Final = re.compile(r"[nrtbf]|u[0-9A-Fa-f]{4}")  # RFC 8259, 7


def possessive(one: str, times: str) -> str:
    """Return the pattern that repeats `one` as often as it can and gives nothing of it back.

    An atomic group: a possessive one of Python before 3.11.5 keeps what its last turn read when it failed (gh-106052).

    :param one: pattern. :param times: a quantifier, such as `*` or `{0,4}`.
    """
    if times == "*":  # by the thousand: what could be given back takes memory until its group ends
        one = possessive(one, "{1,1000}")
    return f"(?>(?:{one}){times})"


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
    start = behind_escape(text, hit.start)
    if start == hit.start or start >= hit.end:
        return hit
    return Hit(start, hit.end, hit.kind, hit.value[start - hit.start :])


def behind_escape(text: str, start: int) -> int:
    """Where the escape ends whose `\\` stands before a place; the place itself if there is none.

    JSON within a string of JSON has more than one `\\` there.
    """
    escape = _ESCAPE.match(text, start) if text[max(0, start - 1) : start] == "\\" else None
    return escape.end() if escape else start
