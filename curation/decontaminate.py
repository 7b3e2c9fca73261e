"""The stage of decontamination: rows that hold an item of an evaluation set end.

A text of an item is found in a row if the row holds at least a share of its distinct runs of neighbouring words, as in
the decontamination of GPT-3 (Brown et al., 2020, appendix C) by runs of 13 words; case, punctuation and composition
make no difference. A text shorter than a run is looked for as a whole. All texts of a row are looked at as one, so that
an item that is split over messages is found too, or stands in thoughts and calls. What is said in other words, or with
other numbers, is not found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from curation.reasons import Filtered
from curation.stage import Stage, Staged, refusals
from curation.turns import texts_of
from curation.words import PROFILE, shingles, words

#: Raised when the same row or item ends in another way: part of the rules, so of the digest.
VERSION: Final = 1
#: The same where C4's rules change texts, which are looked through again behind them (`stages.sought_again`).
VERSION_WITH_C4: Final = 2
#: A text with fewer words says too little to be found by.
LEAST_WORDS: Final = 5
#: A run in more texts than this is a form of words, not an item.
MOST_TEXTS: Final = 100
#: The stage's counters of rows by item begin with it.
FOUND: Final = "contaminated:"

_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ARRAYS: Final = ("size", "total", "item")


@dataclass(frozen=True)
class Decontamination:
    """What is looked for. Integers and text only: it is part of the digest.

    :param sets: pairs of an evaluation set's name and the SHA-256 of its file, in the order of names.
    :param words: of a run. :param per_million: share of a text's runs from which on it is found, in millionths.
    """

    sets: tuple[tuple[str, str], ...]
    words: int
    per_million: int
    least: int = LEAST_WORDS
    most: int = MOST_TEXTS
    profile: str = PROFILE
    version: int = VERSION


@dataclass(frozen=True)
class Index:
    """The runs of all texts of all items.

    :param size: words of a run of each text. :param total: its distinct runs that are looked for; 0 if there are none.
    :param item: the number of its item, over all sets.
    :param runs: by size, sorted hashes of runs. :param texts: by size, the text of each of these.
    """

    size: npt.NDArray[np.int64]
    total: npt.NDArray[np.int64]
    item: npt.NDArray[np.int64]
    runs: dict[int, npt.NDArray[np.uint64]]
    texts: dict[int, npt.NDArray[np.int64]]

    def save(self, path: Path) -> None:
        """Write to a file that workers load; it takes its name when it is whole."""
        temporary = path.with_name(f"{path.name}.part")
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        for size in self.runs:
            arrays |= {f"runs_{size}": self.runs[size], f"texts_{size}": self.texts[size]}
        with temporary.open("wb") as stream:
            np.savez(stream, **arrays)
        temporary.replace(path)


@lru_cache(2)
def load(path: Path) -> Index:
    with np.load(path) as found:
        sizes = [int(name.removeprefix("runs_")) for name in found.files if name.startswith("runs_")]
        heads = {name: found[name] for name in _ARRAYS}
        return Index(
            **heads, runs={n: found[f"runs_{n}"] for n in sizes}, texts={n: found[f"texts_{n}"] for n in sizes}
        )


def build(texts: Sequence[str], items: Sequence[int], rules: Decontamination) -> Index:
    """The index of texts. :param items: the item of each."""
    lengths = np.diff(words(texts)[1]) if texts else np.empty(0, np.int64)
    size = np.where(lengths < rules.least, 0, np.minimum(lengths, rules.words))
    total = np.zeros(size.size, np.int64)
    runs: dict[int, npt.NDArray[np.uint64]] = {}
    owners: dict[int, npt.NDArray[np.int64]] = {}
    for length in (int(value) for value in np.unique(size) if value):
        chosen = np.flatnonzero(size == length)
        values, offsets = shingles(*words([texts[at] for at in chosen.tolist()]), length)
        owner = np.repeat(chosen, np.diff(offsets))
        order = np.lexsort((owner, values))
        values, owner = values[order], owner[order]
        _, inverse, often = np.unique(values, return_inverse=True, return_counts=True)
        rare = often[inverse] <= rules.most
        runs[length], owners[length] = values[rare], owner[rare]
        total += np.bincount(owner[rare], minlength=size.size)
    return Index(size, total, np.asarray(items, np.int64), runs, owners)


def make_decontaminate(rules: Decontamination, path: Path) -> Stage:
    """The stage. It counts rows by item, as `contaminated:NUMBER`. :param path: the index, as `Index.save` wrote it."""

    def stage(passages: pa.RecordBatch) -> Staged:
        index = load(path)
        numbers, texts = _rows(passages)
        hits = list(found(texts, index, rules.per_million))
        counts = Counter(f"{FOUND}{item}" for _, item in {(row, int(index.item[text])) for row, text, _ in hits})
        best: dict[int, tuple[int, int]] = {}
        for row, text, shared in hits:  # texts come in order: of equals the first one is told
            if row not in best or shared * index.total[best[row][0]] > best[row][1] * index.total[text]:
                best[row] = (text, shared)
        details = [
            f"item {index.item[text] + 1} of the evaluation sets: {shared} of {index.total[text]} runs of"
            f" {index.size[text]} words"
            for text, shared in best.values()
        ]
        ended = refusals([numbers[row] for row in best], [Filtered.CONTAMINATED] * len(best), details)
        return Staged(passages, ended, counts)

    return stage


def found(texts: Sequence[str], index: Index, per_million: int) -> Iterator[tuple[int, int, int]]:
    """(place in `texts`, text of an item that it holds, runs that both have), in order."""
    pairs: list[npt.NDArray[np.int64]] = []
    width = max(1, index.total.size)
    hashes, ends = words(texts)
    for length, runs in index.runs.items():
        values, offsets = shingles(hashes, ends, length)
        first, last = np.searchsorted(runs, values, "left"), np.searchsorted(runs, values, "right")
        held = np.flatnonzero(last > first)
        often = (last - first)[held]
        rows = np.repeat(np.searchsorted(offsets, held, "right") - 1, often)
        starts = np.repeat(first[held] - (np.cumsum(often) - often), often)
        pairs.append(rows * width + index.texts[length][starts + np.arange(often.sum())])
    keys, shared = np.unique(np.concatenate(pairs) if pairs else np.empty(0, np.int64), return_counts=True)
    enough = shared * 1_000_000 >= per_million * index.total[keys % width]
    for key, count in zip(keys[enough].tolist(), shared[enough].tolist(), strict=True):
        yield key // width, key % width, count


def _rows(passages: pa.RecordBatch) -> tuple[list[int], list[str]]:
    """(numbers of the rows, all that each says)."""
    said: dict[int, list[str]] = {}
    columns = (passages.column(name).to_pylist() for name in ("row", "content", "beside"))
    for row, content, beside in zip(*columns, strict=True):
        for text in (content, *(texts_of(beside) if beside else ())):
            said.setdefault(row, []).append(text)
            if "\\" in text:  # an item may stand in a string of JSON, as tools answer
                said[row].append(_ESCAPE.sub(_unescaped, text))
    return list(said), ["\n".join(parts) for parts in said.values()]


def _unescaped(escape: re.Match[str]) -> str:
    text = escape.group()
    code = int(text[2:], 16) if len(text) == 6 else 0x20
    return " " if 0xD800 <= code < 0xE000 else chr(code)
