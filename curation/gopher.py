"""The rules of Gopher on quality and repetition, on many texts at once.

Rae et al., Scaling Language Models, 2021, appendix A.1 and table A1 (https://arxiv.org/abs/2112.11446). The paper
leaves some terms open; here

- a word is a run of characters that are not white space; in scripts that are written without spaces, such as Chinese
  and Thai, every character is a word, and such words have no part in the mean length;
- a line has at least one word, and lines are equal if their words are; a blank line parts paragraphs;
- characters are those of words: white space belongs neither to a repeated part nor to the whole;
- what is repeated counts without its first occurrence, each character once; an n-gram that occurs once repeats nothing.

Texts are compared by 64-bit hashes, within one text only. Nothing is a float.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from curation.words import Hashes, Offsets, mixed

MILLION: Final = 1_000_000
STOP_WORDS: Final = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS: Final = "\u2022\u2023\u25e6\u2043\u25aa\u25cf"

Measures = dict[str, Offsets]

_BLOCK: Final = 1 << 18  # characters at a time: what stays in a core's caches
#: Words in the n-grams of which the most frequent counts, and of which all that repeat count.
TOP: Final = (2, 3, 4)
LONG: Final = (5, 6, 7, 8, 9, 10)
_WHITE, _LETTER, _ALONE, _BULLET = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
_NEW_LINE, _HASH, _DOT, _DASH, _STAR, _ELLIPSIS = 10, 35, 46, 45, 42, 0x2026
# Scripts that are written without spaces, with their punctuation: Thai, Lao, Tibetan, Myanmar; Khmer; Kana; Han.
_UNSPACED: Final = (
    (0x0E00, 0x10A0),
    (0x1780, 0x1800),
    (0x3000, 0x3100),
    (0x31F0, 0x3200),
    (0x3400, 0xA000),
    (0xF900, 0xFB00),
    (0xFF00, 0xFFF0),
    (0x20000, 0x40000),
)
_STEP: Final = 0x9E3779B97F4A7C15  # as in `curation.words`
_BACK: Final = pow(_STEP, -1, 1 << 64)


@dataclass(frozen=True)
class Gopher:
    """Thresholds on quality, None for a rule that is off. Shares and mean lengths are in millionths.

    :param hashes: `#` signs, and :param ellipses: ellipses, as a share of the words.
    :param stop_words: of these, so many different ones must occur, in lower case, capitalised or in capitals.
    """

    min_words: int | None = 50
    max_words: int | None = 100_000
    min_mean_word_length: int | None = 3 * MILLION
    max_mean_word_length: int | None = 10 * MILLION
    max_hashes: int | None = 100_000
    max_ellipses: int | None = 100_000
    max_bullet_lines: int | None = 900_000
    max_ellipsis_lines: int | None = 300_000
    min_alphabetic_words: int | None = 800_000
    min_stop_words: int | None = 2
    stop_words: tuple[str, ...] = STOP_WORDS


@dataclass(frozen=True)
class Repetition:
    """Thresholds on repetition in millionths of lines, paragraphs or characters, None for a rule that is off.

    :param max_top_grams: for the most frequent n-gram of 2, 3 and 4 words.
    :param max_duplicate_grams: for all repeated n-grams of 5 to 10 words.
    """

    max_duplicate_lines: int | None = 300_000
    max_duplicate_paragraphs: int | None = 300_000
    max_duplicate_line_characters: int | None = 200_000
    max_duplicate_paragraph_characters: int | None = 200_000
    max_top_grams: tuple[int | None, ...] = (200_000, 180_000, 160_000)
    max_duplicate_grams: tuple[int | None, ...] = (150_000, 140_000, 130_000, 120_000, 110_000, 100_000)


class Rule(NamedTuple):
    """`part` must be at least or at most `bar`: times `whole` in millionths, or as a number if `whole` is empty."""

    reason: str
    part: str
    whole: str
    least: bool
    bar: int | None

    def broken(self, measures: Measures) -> npt.NDArray[np.bool_]:
        """Which texts break it. Cross-multiplied; a text without the whole breaks nothing."""
        assert self.bar is not None
        part = measures[self.part] * (MILLION if self.whole else 1)
        bar = self.bar * (measures[self.whole] if self.whole else np.ones_like(part))
        return part < bar if self.least else part > bar

    def said(self, measures: Measures, index: int) -> str:
        """What was found in a text, in numbers."""
        found, bar = int(measures[self.part][index]), self.bar or 0
        side = "at least" if self.least else "at most"
        if not self.whole:
            return f"{found} {self.part.replace('_', ' ')}, {side} {bar}"
        whole = int(measures[self.whole][index])
        return (
            f"{self.part.replace('_', ' ')} {found} of {self.whole.replace('_', ' ')} {whole}, {side} {bar / MILLION:g}"
        )


def quality_rules(gopher: Gopher) -> list[Rule]:
    """The rules that are on, in the order of the paper."""
    rules = [
        Rule("gopher_few_words", "words", "", True, gopher.min_words),
        Rule("gopher_many_words", "words", "", False, gopher.max_words),
        Rule("gopher_mean_word_length", "spaced_characters", "spaced_words", True, gopher.min_mean_word_length),
        Rule("gopher_mean_word_length", "spaced_characters", "spaced_words", False, gopher.max_mean_word_length),
        Rule("gopher_hashes", "hashes", "words", False, gopher.max_hashes),
        Rule("gopher_ellipses", "ellipses", "words", False, gopher.max_ellipses),
        Rule("gopher_bullet_lines", "bullet_lines", "lines", False, gopher.max_bullet_lines),
        Rule("gopher_ellipsis_lines", "ellipsis_lines", "lines", False, gopher.max_ellipsis_lines),
        Rule("gopher_alphabetic_words", "alphabetic_words", "words", True, gopher.min_alphabetic_words),
        Rule("gopher_stop_words", "stop_words", "", True, gopher.min_stop_words),
    ]
    return [rule for rule in rules if rule.bar is not None]


def repetition_rules(repetition: Repetition) -> list[Rule]:
    """As `quality_rules`."""
    parts = [
        ("duplicate_lines", "lines", repetition.max_duplicate_lines),
        ("duplicate_paragraphs", "paragraphs", repetition.max_duplicate_paragraphs),
        ("duplicate_line_characters", "characters", repetition.max_duplicate_line_characters),
        ("duplicate_paragraph_characters", "characters", repetition.max_duplicate_paragraph_characters),
        *((f"top_{n}_gram", "characters", bar) for n, bar in zip(TOP, repetition.max_top_grams, strict=True)),
        *((f"duplicate_{n}_gram", "characters", b) for n, b in zip(LONG, repetition.max_duplicate_grams, strict=True)),
    ]
    return [Rule(f"gopher_{part}", part, whole, False, bar) for part, whole, bar in parts if bar is not None]


def measure(texts: Sequence[str], stop_words: Sequence[str] = STOP_WORDS, repetition: bool = True) -> Measures:
    """What the rules ask for: int64 arrays, one number a text.

    :param repetition: whether what is repeated is measured too. It takes most of the time.
    """
    parts = [_measure(texts[first:last], tuple(stop_words), repetition) for first, last in _blocks(texts)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _blocks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches of texts of some `_BLOCK` characters; one where there is no text."""
    first = size = 0
    for index, text in enumerate(texts):
        if size and size + len(text) > _BLOCK:
            yield first, index
            first, size = index, 0
        size += len(text)
    yield first, len(texts)


def _measure(texts: Sequence[str], stop_words: tuple[str, ...], repetition: bool) -> Measures:
    codes: Any = np.frombuffer("".join([f"{text}\n" for text in texts]).encode("utf-32-le"), "<u4")
    bounds = _ends(np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts)))
    kinds = _kinds()[codes]
    begins, ends = _edges(kinds)
    offsets = np.searchsorted(begins, bounds)
    sizes = ends - begins
    alone = (kinds[begins] & _ALONE) != 0
    lettered = _ends((kinds & _LETTER) != 0)
    line, paragraph = _breaks(codes, begins, offsets)

    def lines(values: npt.NDArray[Any]) -> Offsets:
        return _sums(values, np.searchsorted(line, offsets))

    first, last = begins[line], np.append(ends[line[1:] - 1], ends[-1:]) if line.size else begins
    head = codes[first]
    dashed = ((head == _DASH) | (head == _STAR)) & (ends[line] - first == 1)
    dots = (codes[last - 3] == _DOT) & (codes[last - 2] == _DOT) & (last - first >= 3)
    hashed, ellipses, runs = np.flatnonzero(codes == _HASH), np.flatnonzero(codes == _ELLIPSIS), _runs(codes)
    characters = _Spans(codes.astype(np.uint64) + np.uint64(1))
    words = characters.of(begins, ends)
    measures = {
        "words": np.diff(offsets),
        "spaced_words": _sums(~alone, offsets),
        "spaced_characters": _sums(np.where(alone, 0, sizes), offsets),
        "hashes": np.diff(np.searchsorted(hashed, bounds)),
        "ellipses": np.diff(np.searchsorted(ellipses, bounds)) + _sums(runs[1], np.searchsorted(runs[0], bounds)),
        "lines": np.diff(np.searchsorted(line, offsets)),
        "bullet_lines": lines(((kinds[first] & _BULLET) != 0) | dashed),
        "ellipsis_lines": lines((codes[last - 1] == _ELLIPSIS) | (codes[last - 1] == _DOT) & dots),
        "alphabetic_words": _sums(lettered[ends] > lettered[begins], offsets),
        "stop_words": _stops(words, sizes, offsets, stop_words),
    }
    return measures | _repeated(words, sizes, offsets, line, paragraph) if repetition else measures


@lru_cache(1)
def _kinds() -> npt.NDArray[np.uint8]:
    """What each code point is; there is neither a letter nor white space beyond the first four planes."""
    kinds = np.zeros(0x110000, np.uint8)
    for code in range(0x40000):
        char = chr(code)
        if char.isalpha():
            kinds[code] = _LETTER
        elif char.isspace():
            kinds[code] = _WHITE
    for first, last in _UNSPACED:
        for code in range(first, last):
            if kinds[code] != _WHITE:
                # Marks of such scripts stand alone too.
                marked = kinds[code] == _LETTER or unicodedata.category(chr(code))[0] == "M"
                kinds[code] = _ALONE | _LETTER if marked else _ALONE
    kinds[[ord(bullet) for bullet in BULLETS]] = _BULLET
    return kinds


def _edges(kinds: npt.NDArray[np.uint8]) -> tuple[Offsets, Offsets]:
    """Where words begin and end. Every text ends with a line feed."""
    white, alone = (kinds & _WHITE) != 0, (kinds & _ALONE) != 0
    parted = white[:-1] | white[1:] | alone[:-1] | alone[1:]  # between a character and the next
    begins, ends = ~white, ~white
    begins[1:] &= parted
    ends[:-1] &= parted
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


def _breaks(codes: npt.NDArray[Any], begins: Offsets, offsets: Offsets) -> tuple[Offsets, Offsets]:
    """The words that begin lines and those that begin paragraphs."""
    feeds = np.diff(np.searchsorted(np.flatnonzero(codes == _NEW_LINE), begins), prepend=-2)
    feeds[offsets[:-1][offsets[:-1] < begins.size]] = 2
    return np.flatnonzero(feeds > 0), np.flatnonzero(feeds > 1)


def _runs(codes: npt.NDArray[Any]) -> tuple[Offsets, Offsets]:
    """Where runs of three dots or more begin, and how often `...` fits into each."""
    dots = np.flatnonzero(codes == _DOT)
    starts = np.flatnonzero(np.diff(dots, prepend=-2) > 1)
    counts = np.diff(np.append(starts, dots.size)) // 3
    return dots[starts], counts


def _stops(words: Hashes, sizes: Offsets, offsets: Offsets, stop_words: tuple[str, ...]) -> Offsets:
    """How many different stop words each text has."""
    hashes, numbers, longest = _stop_hashes(stop_words)
    if not hashes.size:
        return np.zeros(offsets.size - 1, np.int64)
    few = np.flatnonzero(sizes <= longest)
    place = np.minimum(np.searchsorted(hashes, words[few]), hashes.size - 1)
    hit = hashes[place] == words[few]
    text = np.searchsorted(offsets, few[hit], "right") - 1
    different = np.unique(text * len(stop_words) + numbers[place[hit]])
    return np.bincount(different // len(stop_words), minlength=offsets.size - 1)


@lru_cache(8)
def _stop_hashes(stop_words: tuple[str, ...]) -> tuple[Hashes, Offsets, int]:
    """(sorted hashes, the number of the word each stands for, the longest word's length)."""
    forms = {form: n for n, word in enumerate(stop_words) for form in (word, word.capitalize(), word.upper())}
    data = "".join(forms)
    codes = np.frombuffer(data.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
    ends = _ends(np.fromiter(map(len, forms), np.int64, len(forms)))
    hashes = _Spans(codes).of(ends[:-1], ends[1:])
    order = np.argsort(hashes)
    numbers = np.fromiter(forms.values(), np.int64, len(forms))
    return hashes[order], numbers[order], max(map(len, forms), default=0)


def _repeated(words: Hashes, sizes: Offsets, offsets: Offsets, line: Offsets, paragraph: Offsets) -> dict[str, Offsets]:
    """What occurs again within each text."""
    spans, length, texts = _Spans(words), _ends(sizes), np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    found = {"characters": np.diff(length[offsets])}
    for name, starts in (("line", line), ("paragraph", paragraph)):
        ends = np.append(starts[1:], words.size) if starts.size else starts
        again = _again(spans.of(starts, ends) + _named(texts[starts]))
        cuts = np.searchsorted(starts, offsets)
        found[f"{name}s"] = np.diff(cuts)
        found[f"duplicate_{name}s"] = _sums(again, cuts)
        found[f"duplicate_{name}_characters"] = _sums(np.where(again, length[ends] - length[starts], 0), cuts)
    left = offsets[1:][texts] - np.arange(words.size)  # words from here to the text's end
    at = np.flatnonzero(left >= 2)
    for n in (*TOP, *LONG):
        # A run of words comes again only if both runs within it that are a word shorter do.
        if n > 2:
            before = np.zeros(words.size + 1, np.bool_)
            before[at] = True
            at = at[before[at + 1] & (left[at] >= n)]
        at, first, counts = _groups(at, spans.of(at, at + n) + _named(texts[at]))
        if n in TOP:
            found[f"top_{n}_gram"] = _most(first, counts, length[first + n] - length[first], texts, offsets)
        else:
            found[f"duplicate_{n}_gram"] = _covered(at, first, n, sizes, offsets)
    return found


def _named(texts: Offsets) -> Hashes:
    """What keeps the parts of one text from those of another."""
    return mixed(texts.astype(np.uint64) + np.uint64(1))


def _again(keys: Hashes) -> npt.NDArray[np.bool_]:
    """Which keys stand further in front already."""
    order = np.argsort(keys, kind="stable")
    again = np.zeros(keys.size, np.bool_)
    again[order[1:][keys[order[1:]] == keys[order[:-1]]]] = True
    return again


def _groups(places: Offsets, keys: Hashes) -> tuple[Offsets, Offsets, Offsets]:
    """(places whose key another has too, rising; the first place of each such key; how many have it)."""
    if keys.size > 256:
        # Most keys are alone, and a table of counters tells so of most of them.
        slots = (keys >> np.uint64(64 - max(8, int(keys.size).bit_length() + 1))).astype(np.int64)
        shared = np.bincount(slots)[slots] > 1
        places, keys = places[shared], keys[shared]
    order = np.argsort(keys)
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: ordered.size])
    counts = np.diff(np.append(starts, ordered.size))
    firsts = np.minimum.reduceat(places[order], starts) if starts.size else places
    several = counts > 1
    held = np.sort(places[order[np.repeat(several, counts)]])
    return held, firsts[several], counts[several]


def _most(first: Offsets, counts: Offsets, sizes: Offsets, texts: Offsets, offsets: Offsets) -> Offsets:
    """Characters of each text's most frequent n-gram, of all its occurrences; of several the longest."""
    best = np.zeros(offsets.size - 1, np.int64)
    np.maximum.at(best, texts[first], (counts << 36) | sizes)
    return (best >> 36) * (best & ((1 << 36) - 1))


def _covered(at: Offsets, first: Offsets, n: int, sizes: Offsets, offsets: Offsets) -> Offsets:
    """Characters within n-grams that occurred before, each once."""
    again = np.setdiff1d(at, first, assume_unique=True)
    if not again.size:
        return np.zeros(offsets.size - 1, np.int64)
    steps = np.zeros(sizes.size + 1, np.int64)
    steps[again] += 1
    steps[again + n] -= 1
    return _sums(np.where(np.cumsum(steps[:-1]) > 0, sizes, 0), offsets)


def _ends(sizes: npt.NDArray[Any]) -> Offsets:
    """Running sums, from 0."""
    ends = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends


def _sums(values: npt.NDArray[Any], offsets: Offsets) -> Offsets:
    """Sums of the stretches between offsets."""
    return np.diff(_ends(values)[offsets])


class _Spans:
    """Hashes of stretches of a sequence: polynomials modulo 2^64, from running sums, whatever their length."""

    def __init__(self, values: Hashes) -> None:
        self.sums = np.zeros(values.size + 1, np.uint64)
        powers, self.back = _powers(max(12, int(values.size).bit_length()))
        np.cumsum(values * powers[: values.size], out=self.sums[1:])

    def of(self, starts: Offsets, ends: Offsets) -> Hashes:
        return mixed((self.sums[ends] - self.sums[starts]) * self.back[starts])


@lru_cache(2)
def _powers(bits: int) -> tuple[Hashes, Hashes]:
    """2^bits powers of an odd number, and those of its inverse."""
    both = []
    for factor in (_STEP, _BACK):
        powers = np.ones(1, np.uint64)
        for done in range(bits):
            powers = np.concatenate([powers, powers * np.uint64(pow(factor, 1 << done, 1 << 64))])
        both.append(powers)
    return both[0], both[1]


def judged(measures: Mapping[str, Offsets], rules: Sequence[Rule]) -> npt.NDArray[np.int64]:
    """The first rule that each text breaks, by number, or -1."""
    count = next(iter(measures.values())).size
    result = np.full(count, -1, np.int64)
    for number, rule in enumerate(rules):
        result[rule.broken(dict(measures)) & (result < 0)] = number
    return result
