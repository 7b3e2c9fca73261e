"""The stage of Unicode repair: text that programs damaged becomes what people wrote.

In this order, of each text that is trained on:

- UTF-8 that was read as Windows-1252 or Latin-1 is read again, by ftfy (https://ftfy.readthedocs.io), line by line and
  only where misreading the result gives the line as it came;
- CR LF and CR become LF, and so does every control character that ends a line: VT, FF, U+001C to U+001E and U+0085.
  U+001F, which parts words, becomes a space, other control characters than tabs go;
- byte order marks, soft hyphens and word joiners go. Joiners stay where both neighbours are of scripts, or symbols, in
  which they mean something (emoji, Arabic, Indic scripts), zero-width spaces between characters of scripts without
  spaces;
- what is left is composed: NFC (https://www.unicode.org/reports/tr15/), never NFKC, which changes what is said. Text
  with more than 30 marks on one character, which no language has, is not composed, as that takes quadratic time.

U+FFFD, where something was lost already, is counted and left: nobody can say what stood there.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from curation.columns import strings
from curation.composing import many_marks
from curation.misread import SHOWN
from curation.stage import Stage, Staged, refusals
from curation.turns import with_texts
from dropforge.errors import RecipeError

#: Raised when the same text gives another one: part of the rules, so of the digest.
VERSION: Final = 1

_LAYERS: Final = 3  # times that text may have been misread
_LOOKED_AT: Final = r"[^\t\n\x20-\x7e]"
_LOOKED_AT_IN_JSON: Final = rf"{_LOOKED_AT}|\\[bfru]"
_NEW_LINE: Final = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85]")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x9f]")
_UNSEEN: Final = re.compile("[\u00ad\ufeff\u2060\u200b\u200c\u200d]+")
_UNSPACED: Final = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


@dataclass(frozen=True)
class Repair:
    """What mends, with the versions that decide how. Text and integers only: it is part of the digest."""

    mojibake: str
    unicode: str = unicodedata.unidata_version
    version: int = VERSION


def repair_rules() -> Repair:
    """The repair that this machine does. :raises RecipeError: if ftfy is not installed."""
    _ftfy()
    return Repair(f"ftfy {version('ftfy')}")


@lru_cache(1)
def _ftfy() -> tuple[Any, Any]:
    try:
        ftfy = import_module("ftfy")
    except ImportError:
        raise RecipeError(
            "recipe key `curation.unicode`",
            "the package ftfy, which repairs misread text, is not installed",
            "Install `dropforge[text]`, or set it to keep",
        ) from None
    # Guesses are off: what was lost stays lost, and a line is misread as a whole or not at all.
    settings = ftfy.TextFixerConfig(
        restore_byte_a0=False, replace_lossy_sequences=False, decode_inconsistent_utf8=False, fix_c1_controls=False
    )
    return ftfy.fix_encoding, settings


def make_repair(_: Repair) -> Stage:
    """The stage. It counts rows: `unicode_repaired`, and by what was done to them."""
    _ftfy()

    def stage(passages: pa.RecordBatch) -> Staged:
        found = pc.indices_nonzero(pc.match_substring_regex(passages.column("content"), _LOOKED_AT)).to_pylist()
        beside = pc.indices_nonzero(pc.match_substring_regex(passages.column("beside"), _LOOKED_AT_IN_JSON)).to_pylist()
        rows = passages.column("row").to_pylist() if found or beside else []
        contents = passages.column("content").to_pylist() if found else []
        said = passages.column("beside").to_pylist() if beside else []
        done: set[tuple[str, int]] = set()
        for at in found:
            contents[at], what = repaired(contents[at])
            done |= {(name, rows[at]) for name in what}
        for at in beside:
            said[at], what = _repaired_within(said[at])
            done |= {(name, rows[at]) for name in what}
        changed = {(name, row) for name, row in done if name not in {"lost", "not_composed"}}
        counts = Counter(f"unicode_{name}" for name, _ in done)
        counts["unicode_repaired"] = len({row for _, row in changed})
        if changed and found:
            passages = passages.set_column(2, "content", strings(contents))
        if changed and beside:
            passages = passages.set_column(3, "beside", strings(said))
        return Staged(passages, refusals([], [], []), +counts)

    return stage


def _repaired_within(said: str) -> tuple[str, set[str]]:
    """The same for the texts of thoughts and calls."""
    what: set[str] = set()

    def mend(text: str) -> str:
        mended, how = repaired(text)
        what.update(how)
        return mended

    return with_texts(said, mend), what


def repaired(text: str) -> tuple[str, set[str]]:
    """(the text, what was done: `mojibake`, `new_lines`, `controls`, `unseen`, `composed`; or seen: `lost`,
    `not_composed`)."""
    what: set[str] = set()

    def became(new: str, name: str) -> str:
        if new != text:
            what.add(name)
        return new

    if SHOWN.search(text):
        text = became("\n".join(map(_reread, text.split("\n"))), "mojibake")
    text = became(_NEW_LINE.sub("\n", text), "new_lines")
    text = became(_CONTROL.sub("", text.replace("\x1f", " ")), "controls")
    text = became(_UNSEEN.sub(_seen, text), "unseen")
    if not text.isascii():
        if many_marks(text):
            what.add("not_composed")
        else:
            text = became(unicodedata.normalize("NFC", text), "composed")
    if "\ufffd" in text:
        what.add("lost")
    return text, what


def _reread(line: str) -> str:
    """A line that was UTF-8 and misread, as it was written; any other as it is."""
    if not SHOWN.search(line):
        return line
    fix, settings = _ftfy()
    mended = str(fix(line, settings))
    shown = {mended}
    for _ in range(_LAYERS if mended != line else 0):
        data = [text.encode("utf-8", "surrogatepass") for text in shown]
        shown = {text.decode(encoding) for text in data for encoding in ("sloppy-windows-1252", "latin-1")}
        if line in shown:
            return mended
    return line


def _seen(run: re.Match[str]) -> str:
    """Of characters that nobody sees the first that does something where they stand."""
    before, after = run.string[max(0, run.start() - 1) : run.start()], run.string[run.end() : run.end() + 1]
    return next((char for char in run.group() if _needed(char, before, after)), "")


def _needed(char: str, before: str, after: str) -> bool:
    if char == "\u200b":
        return bool(_UNSPACED.match(before) and _UNSPACED.match(after))
    # Latin, Greek and Cyrillic letters, spaces and punctuation join nothing; behind a virama a joiner may end a word.
    return char in "\u200c\u200d" and _joining(before) and (_joining(after) or unicodedata.combining(before) == 9)


def _joining(char: str) -> bool:
    return bool(char) and ord(char) >= 0x0530 and not char.isspace()
