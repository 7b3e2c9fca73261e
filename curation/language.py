"""The stage of language: rows in other languages than those that are wanted end here.

Languages are told by py3langid (https://github.com/adbar/py3langid, after Lui and Baldwin, langid.py, ACL 2012), whose
model comes with it; the likeliest one counts, whatever its score. Text with few letters has no language. Messages of
the system are no part of what is said. Of the others each has the same share in what is looked at, which is their first
letters with what stands between them; long runs without any, such as figures, tell no language and are passed over.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from curation.quality import wanted
from curation.stage import Stage, Staged, refusals
from dropforge.errors import RecipeError

#: What text has that is too short to tell (ISO 639-2: undetermined).
UNKNOWN: Final = "und"
_LOOKED_AT: Final = 1000  # letters: more cost time and tell nothing new
_LEAST: Final = 100  # letters of each message
_GAP: Final = 7  # characters between two letters, at most: more are no vowel signs, marks or punctuation


@dataclass(frozen=True)
class Language:
    """Which languages are kept. Integers and text only: it is part of the digest.

    :param keep: ISO 639 codes. :param of: `answers` for the assistant's messages, `all` for all but the system's.
    :param min_letters: with fewer, a text has no language. :param unknown: `keep` or `drop` those.
    :param identifier: the package that decides, with its version. :param unicode: the version of the tables of letters.
    """

    keep: tuple[str, ...]
    of: str
    min_letters: int
    unknown: str
    identifier: str
    unicode: str = unicodedata.unidata_version


def identifier() -> str:
    """Name and version of the package that tells languages. :raises RecipeError: if it is not there."""
    _model()
    return f"py3langid {version('py3langid')}"


@lru_cache(1)
def _model() -> Any:
    try:
        langid = import_module("py3langid.langid")
    except ImportError:
        raise RecipeError(
            "recipe key `curation.language`",
            "the package py3langid, which detects languages, is not installed",
            "Install `dropforge[text]`, or leave the key out",
        ) from None
    # One of our own: the package's functions share one that others may restrict to some languages.
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def known() -> frozenset[str]:
    """The codes that can be told."""
    return frozenset(_model().labels)


def language_of(text: str, min_letters: int) -> str:
    """The code of a text's language, or `UNKNOWN`. All of the text is looked at."""
    if sum(map(str.isalpha, text)) < min_letters:
        return UNKNOWN
    return str(_model().classify(text)[0])


def looked_at(messages: Sequence[str]) -> str:
    """The beginning of each message, an equal share of 1,000 letters, where it has that many, and at least 100."""
    share = max(_LOOKED_AT // len(messages), _LEAST)
    return "\n".join([_head(message, share) for message in messages])


def _head(text: str, letters: int) -> str:
    pieces: list[str] = []
    left = letters
    for piece in _pieces(letters).finditer(text):
        pieces.append(piece.group())
        left -= len(piece.group())
        if left <= 0:
            break
    return " ".join(pieces)


@cache
def _pieces(letters: int) -> re.Pattern[str]:
    """Up to so many letters without a long gap. No character is of both classes: linear time on any text."""
    return re.compile(rf"[^\W\d_](?:[\W\d_]{{0,{_GAP}}}[^\W\d_]){{0,{letters - 1}}}")


def make_language(language: Language) -> Stage:
    """The stage that keeps these languages. It counts rows by language: there are about 140."""
    keep = frozenset(language.keep)

    def stage(passages: pa.RecordBatch) -> Staged:
        said = passages.filter(pc.fill_null(pc.not_equal(passages.column("role"), "system"), True))
        contents = said.column("content").to_pylist()
        counts: Counter[str] = Counter()
        ended: list[tuple[int, str, str]] = []
        for row, places in wanted(said, language.of).items():
            text = looked_at([contents[at] for at in places])
            code = language_of(text, language.min_letters)
            where = f"in the {len(text):,} characters looked at"
            counts[f"language_{code}"] += 1
            if code == UNKNOWN:
                if language.unknown == "drop":
                    ended.append((row, "unknown_language", f"fewer than {language.min_letters} letters {where}"))
            elif code not in keep:
                ended.append((row, "other_language", f"it reads as {code} {where}"))
        numbers, reasons, details = zip(*ended, strict=True) if ended else ((), (), ())
        return Staged(passages, refusals(numbers, reasons, details), counts)

    return stage
