"""The stage of language: rows in other languages than those that are wanted end here.

Languages are told by py3langid (https://github.com/adbar/py3langid, after Lui and Baldwin, langid.py, ACL 2012), whose
model comes with it; the likeliest one counts, whatever its score. Text with few letters has no language.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import pyarrow as pa

from curation.quality import joined, wanted
from curation.stage import Stage, Staged, refusals
from dropforge.errors import RecipeError

#: What text has that is too short to tell (ISO 639-2: undetermined).
UNKNOWN: Final = "und"
_LOOKED_AT: Final = 1000  # characters: more cost time and tell nothing new


@dataclass(frozen=True)
class Language:
    """Which languages stay. Integers and text only: it is part of the digest.

    :param keep: ISO 639 codes. :param of: as `curation.quality.Quality`'s.
    :param min_letters: with fewer, a text has no language. :param unknown: `keep` or `drop` those.
    :param identifier: the package that decides, with its version.
    """

    keep: tuple[str, ...]
    of: str
    min_letters: int
    unknown: str
    identifier: str


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
            "the package py3langid, which tells languages, is not installed",
            "Install `dropforge[text]`, or leave the key out",
        ) from None
    # One of our own: the package's functions share one that others may restrict to some languages.
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def known() -> frozenset[str]:
    """The codes that can be told."""
    return frozenset(_model().labels)


def language_of(text: str, min_letters: int) -> str:
    """The code of a text's language, or `UNKNOWN`."""
    head = text[:_LOOKED_AT]
    if sum(map(str.isalpha, head)) < min_letters:
        return UNKNOWN
    return str(_model().classify(head)[0])


def make_language(language: Language) -> Stage:
    """The stage that keeps these languages. It counts rows by language: there are about 140."""
    keep = frozenset(language.keep)

    def stage(passages: pa.RecordBatch) -> Staged:
        rows = wanted(passages, language.of)
        texts = joined(passages.column("content").to_pylist(), rows)
        counts: Counter[str] = Counter()
        ended: list[tuple[int, str, str]] = []
        for row, text in zip(rows, texts, strict=True):
            code = language_of(text, language.min_letters)
            counts[f"language_{code}"] += 1
            if code == UNKNOWN:
                if language.unknown == "drop":
                    ended.append((row, "unknown_language", f"fewer than {language.min_letters} letters"))
            elif code not in keep:
                ended.append((row, "other_language", f"it reads as {code}"))
        numbers, reasons, details = zip(*ended, strict=True) if ended else ((), (), ())
        return Staged(passages, refusals(numbers, reasons, details), counts)

    return stage
