"""Gopher's rules over many texts at once say what a slow, plain counting of each text says."""

from __future__ import annotations

import re
import time
import unicodedata
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation import gopher
from curation.gopher import BULLETS, STOP_WORDS, measure

UNSPACED = re.compile(
    "([\u0e00-\u109f\u1780-\u17ff\u3001-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff])"
)


def lettered(char: str) -> bool:
    return char.isalpha() or (bool(UNSPACED.match(char)) and unicodedata.category(char)[0] == "M")


def split(text: str) -> list[str]:
    return UNSPACED.sub(r" \1 ", text).split()


def plain(text: str, stop_words: tuple[str, ...] = STOP_WORDS) -> dict[str, int]:
    """All measures of one text by counting."""
    words = split(text)
    raw = [line for line in text.split("\n") if line.split()]
    lines = [split(line) for line in raw]
    blocks = groupby(text.split("\n"), key=lambda line: bool(line.split()))
    paragraphs = [split("\n".join(block)) for full, block in blocks if full]
    spaced = [word for word in words if not UNSPACED.match(word)]

    def size(some: list[str] | tuple[str, ...]) -> int:
        return sum(map(len, some))

    def again(parts: list[list[str]]) -> list[list[str]]:
        return [part for at, part in enumerate(parts) if part in parts[:at]]

    found = {
        "words": len(words),
        "spaced_words": len(spaced),
        "spaced_characters": size(spaced),
        "hashes": text.count("#"),
        "ellipses": text.count("...") + text.count("…"),
        "lines": len(lines),
        "bullet_lines": sum(line[0][0] in BULLETS or line[0] in {"-", "*"} for line in lines),
        "ellipsis_lines": sum(line.rstrip().endswith(("...", "…")) for line in raw),
        "alphabetic_words": sum(any(map(lettered, word)) for word in words),
        "stop_words": sum(any(f in words for f in (w, w.capitalize(), w.upper())) for w in stop_words),
        "characters": size(words),
        "paragraphs": len(paragraphs),
        "duplicate_lines": len(again(lines)),
        "duplicate_line_characters": sum(map(size, again(lines))),
        "duplicate_paragraphs": len(again(paragraphs)),
        "duplicate_paragraph_characters": sum(map(size, again(paragraphs))),
    }
    for n in range(2, 11):
        grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
        if n < 5:
            counted = [(count, size(gram)) for gram, count in Counter(grams).items() if count > 1]
            count, chars = max(counted, default=(0, 0))
            found[f"top_{n}_gram"] = count * chars
        else:
            seen, within = set(), set()
            for at, gram in enumerate(grams):
                if gram in seen:
                    within.update(range(at, at + n))
                seen.add(gram)
            found[f"duplicate_{n}_gram"] = sum(len(words[at]) for at in within)
    return found


def measured(texts: list[str]) -> list[dict[str, int]]:
    made = measure(texts)
    assert all(values.dtype == np.int64 and values.shape == (len(texts),) for values in made.values())
    return [{name: int(values[at]) for name, values in made.items()} for at in range(len(texts))]


WORDS = [
    "a",
    "The",
    "be",
    "dog",
    "x" * 70,
    "#tag",
    "...",
    "wait....",
    "…",
    "•",
    "- ",
    "-",
    "*",
    "42",
    "รา",
    "漢字かな",
    "、9。！ｱ",
    "e\u0301",
]
GAPS = [" ", " ", " ", "\n", "\n", "\n\n", " \n \n", "\t", "\u3000", "\u2028", "\r\n", ""]
texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=60).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


@settings(deadline=None)
@given(st.lists(texts | st.text(max_size=30), max_size=5))
def test_all_measures_equal_those_of_a_plain_count(some: list[str]) -> None:
    assert measured(some) == [plain(text) for text in some]


@settings(deadline=None, max_examples=30)
@given(st.lists(texts, min_size=1, max_size=6))
def test_what_lies_beside_a_text_changes_nothing(some: list[str]) -> None:
    assert measured(some) == [measured([text])[0] for text in some]


def test_long_texts_cut_into_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [f"line {n % 7} of the text\n" * (n % 5) for n in range(40)]
    whole = measured(some)
    monkeypatch.setattr(gopher, "_BLOCK", 64)
    assert measured(some) == whole == [plain(text) for text in some]


def test_no_letter_and_no_space_is_left_out_of_the_table() -> None:
    beyond = map(chr, range(0x40000, 0x110000))
    assert not any(char.isalpha() or char.isspace() for char in beyond)


@pytest.mark.parametrize(
    "text",
    ["a" * 1_000_000, "a " * 500_000, "\n" * 1_000_000, "a\u0301" * 500_000, "\ufffd" * 1_000_000, "." * 1_000_000],
)
def test_a_hostile_megabyte_costs_a_multiple_of_its_length(text: str) -> None:
    def cost(some: str) -> float:
        start = time.process_time()
        measure([some])
        return time.process_time() - start

    cost(text[:1000])
    assert cost(text) < 40 * max(cost(text[: len(text) // 10]), 0.01)
