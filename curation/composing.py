"""Unicode's forms of composition, in time that grows with the text and not with its square.

Marks on one character are put into an order when they are composed, which takes the square of their number.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final, Literal

MOST_MARKS: Final = 30  # Unicode's Stream-Safe Text Format (UAX 15, section 13); no language has as many
#: Up to here the square does no harm.
_SHORT: Final = 1_000
#: Marks are not ASCII. Most texts have no such run, which is found in a tenth of the time, and where every tenth
#: character is looked at, which such a run has three of, in a tenth of that.
_STEP: Final = 10
_SOME: Final = re.compile(rf"[^\x00-\x7f]{{{MOST_MARKS // _STEP}}}")
_BEYOND: Final = re.compile(rf"[^\x00-\x7f]{{{MOST_MARKS + 1},}}")


def composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """The text in a form of UAX 15; as it is, if it is long and has more marks in a row than any language has."""
    if text.isascii() or (len(text) > _SHORT and many_marks(text)):
        return text
    return unicodedata.normalize(form, text)


def many_marks(text: str) -> bool:
    """Whether more than `MOST_MARKS` marks follow each other."""
    if _SOME.search(text[::_STEP]) is None:
        return False
    return any(_marks().search(run.group()) for run in _BEYOND.finditer(text))


@lru_cache(1)
def _marks() -> re.Pattern[str]:
    marks = [code for code in range(0x300, 0x1F000) if unicodedata.combining(chr(code))]
    ranges: list[list[int]] = []
    for code in marks:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return re.compile(f"[{''.join(f'{chr(a)}-{chr(b)}' for a, b in ranges)}]{{{MOST_MARKS + 1},}}")
