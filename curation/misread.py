"""Text whose bytes were read in another encoding than that in which they were written.

UTF-8 shows itself: its bytes, as any page of characters shows them, are a first one and some that go on, and no
language has these characters in that order. Cyrillic and Chinese text that was read as Latin-1 has words of letters
with accents alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

#: Latin-1, Windows in the west, with Cyrillic and in Central Europe, old Macs, and terminals of DOS.
_PAGES: Final = ("latin-1", "cp1252", "cp1251", "cp1250", "mac_roman", "cp437", "cp850")
_NEXT_TO: Final = re.compile(r"[^\x00-\x7f]{2}")
_SEQUENCE: Final = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_HIGH: Final = re.compile(rb"[\x80-\xff]+")
#: Words of letters with accents, and of what Latin-1 has in their place.
_ACCENTS: Final = re.compile(r"[\u0080-\u00ff]{5,}")
#: Pairs that are looked at, and sequences of UTF-8 that are no chance.
_LOOKS: Final = 3
_ENOUGH: Final = 3
#: The first byte of two or more in UTF-8, and one that goes on, as Windows-1252 and Latin-1 show them.
SHOWN: Final = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc"
    "\u2013\u2014\u2018-\u201a\u201c-\u201e\u2020-\u2022\u2026\u2030\u2039\u203a\u20ac\u2122]"
)


def _shown(first: int, last: int) -> Mapping[str, frozenset[str]]:
    """For each character the pages that show one of these bytes so."""
    found: dict[str, set[str]] = {}
    for page in _PAGES:
        for byte in range(first, last + 1):
            with suppress(UnicodeError):
                found.setdefault(bytes([byte]).decode(page), set()).add(page)
    return {character: frozenset(pages) for character, pages in found.items()}


_FIRST: Final = _shown(0xC2, 0xF4)
_MORE: Final = _shown(0x80, 0xBF)
_NONE: Final = frozenset[str]()


def is_misread(text: str) -> bool:
    """Tell whether a text was written in UTF-8 and read as one of a few other encodings, or in another one and read as
    Latin-1.

    :param text: with characters beyond ASCII.
    """
    # Most have none of these, which is told much quicker, and texts in most scripts begin with none.
    if text[:1] > "\u2fff":
        return False
    if ("Ã" in text or "Â" in text or "Ð" in text or "â€" in text) and SHOWN.search(text):
        for page in ("latin-1", "cp1252"):
            with suppress(UnicodeError):
                text.encode(page).decode()
                return True
    pages: set[str] = set()
    latin = False
    for pair in islice(_NEXT_TO.finditer(text), _LOOKS):
        first, second = pair[0][0], pair[0][1]
        pages |= _FIRST.get(first, _NONE) & _MORE.get(second, _NONE)
        latin = latin or max(first, second) < "\u0100"
    return (latin and _is_accented(text)) or any(_is_utf8(text, page) for page in pages)


def _is_utf8(text: str, page: str) -> bool:
    """Whether a text's bytes in this encoding are UTF-8, but for a few that the page has no character for."""
    try:
        data = text.encode(page)
    except UnicodeError:
        return False
    found = [len(sequence) for sequence in _SEQUENCE.findall(data)]
    return len(found) >= _ENOUGH and sum(found) >= 0.9 * sum(map(len, _HIGH.findall(data)))


def _is_accented(text: str) -> bool:
    """Whether most of a text are words of letters with accents alone, and not of one that is repeated."""
    words = _ACCENTS.findall(text)
    most = 2 * sum(map(len, words)) > len(text) - text.count(" ")
    return most and len(set("".join(words))) >= _ENOUGH


def reread(text: str) -> str:
    """A text as it was before its UTF-8 was read as something else; any other as it is."""
    for page in _PAGES:
        with suppress(UnicodeError):
            return text.encode(page).decode()
    return text
