"""Text as near duplicates are compared by: normalised, cut into words or characters, hashed by the batch.

The forms made here are compared and never trained on. Everything is arithmetic on unsigned integers of a fixed width,
so the hashes are the same on every machine with the same version of Unicode's tables, which come with Python; `PROFILE`
names that and the normalisation, and is kept with what it made.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from curation.composing import composed

#: Raised when a text's normal form, its words or their hashes change: part of the rules, so of the digest.
PROFILE: Final = f"nfkc-casefold-1-unicode-{unicodedata.unidata_version}"

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

_WORD_BYTES: Final = 64
# Lower case for ASCII letters, a space for what parts words; bytes beyond ASCII are parts of words here.
_TABLE: Final = bytes(
    byte + 32 if 65 <= byte <= 90 else byte if byte >= 128 or chr(byte).isalnum() or byte == 95 else 32
    for byte in range(256)
)
_BEYOND: Final = re.compile(r"[^\x00-\x7f]+")
# Unicode's Default_Ignorable_Code_Point.
_UNSEEN: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_ODD: Final = re.compile(r"[^\w\x00-\x7f]")
# Scripts that are written without spaces: each of their characters counts as a word.
_UNSPACED: Final = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan; Myanmar; Khmer
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"  # Kana; Han
)
_MASKS: Final = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants (Steele et al., OOPSLA 2014)
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_END: Final = np.uint64(0x94D049BB133111EB)


def normal(text: str) -> str:
    """The text without differences of case, width, composition, unseen characters and white space.

    Unicode's NFKC_Casefold (https://www.unicode.org/reports/tr44/), in which Turkish i, with and without dot, is i too.
    """
    folded = text.lower() if text.isascii() else _BEYOND.sub(_fold, _joined(text)).encode().lower().decode()
    folded = composed(folded)  # what was taken out may have kept a letter from its mark
    return " ".join(folded.split())


def _joined(text: str) -> str:
    """Marks joined to their letters, so that what is not ASCII can be looked at apart."""
    return composed(_UNSEEN.sub("", text))


def _fold(match: re.Match[str]) -> str:
    return _FOLDED(match.group()) if match.end() - match.start() < 5 else folded(match.group())


def _part(match: re.Match[str]) -> str:
    return _PARTED(match.group()) if match.end() - match.start() < 5 else _parted(match.group())


def folded(run: str) -> str:
    """A text as it is compared: in the composed form of Unicode, without case."""
    # A Turkish capital i with a dot becomes i and a dot of its own.
    run = composed(run, "NFKC").casefold().replace("\u0131", "i").replace("\u0307", "")
    return composed(run, "NFKC")


def _parted(run: str) -> str:
    """What is neither letter, digit nor mark parts words."""
    run = _ODD.sub(lambda odd: odd.group() if unicodedata.category(odd.group())[0] == "M" else " ", folded(run))
    return _UNSPACED.sub(lambda found: f" {' '.join(found.group())} ", run)


# Most texts beyond ASCII are so in a few characters, the same ones again and again.
_FOLDED: Final = lru_cache(1 << 14)(folded)
_PARTED: Final = lru_cache(1 << 14)(_parted)


def words(texts: Sequence[str]) -> tuple[Hashes, Offsets]:
    """(hashes of all words, offsets): the words of text i are those from offsets[i] to offsets[i + 1].

    A word is a run of letters, digits and `_`; of more than 64 bytes every 64 count as a word, so that no single word
    costs more than its length.
    """
    forms = [(text if text.isascii() else _BEYOND.sub(_part, _joined(text))).encode() for text in texts]
    # Spaces in front and behind: every word has both its edges, and eight bytes can be loaded from any place.
    data = (b" " + b" ".join(forms) + b" " * 9).translate(_TABLE)
    sizes = np.fromiter(map(len, forms), np.int64, len(forms))
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes + 1)]) + 1
    edges = np.flatnonzero(np.diff(np.frombuffer(data, np.uint8) != 32)) + 1
    starts, lengths = edges[0::2], edges[1::2] - edges[0::2]
    if lengths.size and lengths.max() > _WORD_BYTES:
        starts, lengths = _pieces(starts, lengths)
    return _hashes(data, starts, lengths), np.searchsorted(starts, rows).astype(np.int64)


def characters(texts: Sequence[str]) -> tuple[Hashes, Offsets]:
    """As `words`, for the characters of the normalised texts, white space included."""
    forms = [normal(text) for text in texts]
    codes = np.frombuffer("".join(forms).encode("utf-32-le"), "<u4").astype(np.uint64)
    sizes = np.fromiter(map(len, forms), np.int64, len(forms))
    return mixed(codes + np.uint64(1)), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def shingles(hashes: Hashes, offsets: Offsets, size: int) -> tuple[Hashes, Offsets]:
    """The distinct runs of `size` neighbours of each text, as sorted hashes with offsets; none for a shorter text."""
    counts = np.maximum(np.diff(offsets) - (size - 1), 0)
    ends = np.cumsum(counts)
    firsts = np.repeat(offsets[:-1] - ends + counts, counts) + np.arange(ends[-1] if ends.size else 0)
    total = hashes.size - size + 1
    if total <= 0 or not firsts.size:
        return np.empty(0, np.uint64), np.zeros(offsets.size, np.int64)
    runs = hashes[:total].copy()
    for place in range(1, size):
        runs *= _STEP
        runs += hashes[place : total + place]
    runs = mixed(runs[firsts])
    for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        runs[start:end].sort()
    kept = np.ones(runs.size, np.bool_)
    kept[1:] = runs[1:] != runs[:-1]
    kept[(ends - counts)[counts > 0]] = True
    held = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return runs[kept], held[np.concatenate([np.zeros(1, np.int64), ends])]


def mixed(values: Hashes) -> Hashes:
    """Values whose every bit depends on every bit: splitmix64's finaliser, a bijection."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    values = (values ^ (values >> np.uint64(27))) * _END
    return values ^ (values >> np.uint64(31))


def _pieces(starts: Offsets, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """Long words as several of at most 64 bytes."""
    pieces = -(-lengths // _WORD_BYTES)
    ends = np.cumsum(pieces)
    place = np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)
    left = np.repeat(lengths, pieces) - place * _WORD_BYTES
    return np.repeat(starts, pieces) + place * _WORD_BYTES, np.minimum(left, _WORD_BYTES)


def _hashes(data: bytes, starts: Offsets, lengths: Offsets) -> Hashes:
    """Eight bytes of every word at a time."""
    loads: Any = np.ndarray((len(data) - 7,), "<u8", buffer=data, strides=(1,))
    hashes = lengths.astype(np.uint64) * _STEP
    for done in range(0, _WORD_BYTES, 8):
        left = np.flatnonzero(lengths > done)
        if not left.size:
            break
        part = loads[starts[left] + done] & _MASKS[np.minimum(lengths[left] - done, 8)]
        part = (hashes[left] ^ part) * _MIX
        hashes[left] = (part ^ (part >> np.uint64(29))) * _END
    return mixed(hashes)
