"""What near duplicates are compared by: normal forms, words, shingles, minima."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation.fingerprint import TEXTS, Fingerprints, Near, fingerprints, minima
from curation.words import characters, mixed, normal, shingles, words
from dropforge.recipe_data import found

NEAR = Near("word", 3, 14, 8, 800_000)


def prints(texts: list[str], near: Near = NEAR) -> Fingerprints:
    numbers = [pa.array([value] * len(texts), pa.int64()) for value in (7, 0, 0, 0)]
    numbers[1] = pa.array(range(len(texts)), pa.int64())
    return fingerprints(pa.RecordBatch.from_arrays([*numbers, pa.array(texts, pa.string())], schema=TEXTS), near)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Å ngström", "A\u030a ngstro\u0308m"),
        ("Å", "A\u00ad\u030a"),
        ("ｆｕｌｌ　ｗｉｄｔｈ １２", "full width 12"),
        ("ﬁne", "FINE"),
        ("so\u00adft hyphen", "Soft\u200b hyphen"),
        ("👩\u200d👩\u200d👧 x", "👩👩👧 x"),
        ("\u200fשלום עולם\u200f", "שלום עולם"),
        ("İSTANBUL IŞIK", "istanbul ışık"),
        ("ΣΑΣ ΣΑς", "σας σασ"),
        ("straße", "STRASSE"),
        (" a \t\n b\u00a0c\u2028", "A b c"),
        ("zu\u0307", "zu̇"),
        ("ż", "z\u0307"),
    ],
)
def test_what_differs_in_nothing_that_is_read(one: str, other: str) -> None:
    assert normal(one) == normal(other)
    assert words([one])[0].tolist() == words([other])[0].tolist()


@pytest.mark.parametrize(("one", "other"), [("a b", "ab"), ("2 + 3", "2 - 3"), ("naïve", "naive"), ("no", "no!")])
def test_what_differs(one: str, other: str) -> None:
    assert normal(one) != normal(other)


@settings(deadline=None)
@given(st.text())
def test_normal_form_is_stable(text: str) -> None:
    assert normal(normal(text)) == normal(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("👍 – “”", 0),
        ("one", 1),
        ("It's a snake_case, isn't it?", 7),
        ("naïve café—bar", 3),
        ("日本語のテキスト", 8),
        ("ภาษาไทย", 7),
        ("mixed 中文 text", 4),
        ("नमस्ते दुनिया", 2),
        ("한국어 문장", 2),
        ("x" * 64, 1),
        ("x" * 65, 2),
        ("x" * 1_000_000, 15_625),
    ],
)
def test_what_a_word_is(text: str, count: int) -> None:
    hashes, offsets = words(["before", text, "behind"])
    assert np.diff(offsets).tolist() == [1, count, 1]
    assert hashes[offsets[1] : offsets[2]].tolist() == words([text])[0].tolist()


_text = st.lists(st.sampled_from(["a", "b", "cc", "ddddddddd", "é", "中文", ", ", " ", "x" * 70]), max_size=9).map(
    "".join
)


@settings(deadline=None)
@given(st.lists(_text, max_size=6), st.integers(1, 4), st.sampled_from(["word", "character"]))
def test_texts_do_not_see_their_neighbours(texts: list[str], size: int, unit: str) -> None:
    """What a text's shingles are does not depend on the batch it is in; and they are those that a loop finds."""
    cut = words if unit == "word" else characters
    together, offsets = shingles(*cut(texts), size)
    for text, first, last in zip(texts, offsets, offsets[1:], strict=False):
        alone, _ = shingles(*cut([text]), size)
        assert together[first:last].tolist() == alone.tolist() == sorted(set(alone.tolist()))
        parts = cut([text])[0].tolist()
        assert len(alone) == len({tuple(parts[at : at + size]) for at in range(len(parts) - size + 1)})


def test_words_of_any_length_differ() -> None:
    texts = [("ab" * 40)[:size] for size in range(1, 65)] + [f"{'a' * size}b{'a' * (63 - size)}" for size in range(64)]
    assert len(set(words(texts)[0].tolist())) == len(texts)
    assert len(set(mixed(np.arange(1000, dtype=np.uint64)).tolist())) == 1000


def test_short_rows_are_compared_whole() -> None:
    texts = ["Thanks!", "thanks!", "THANKS", "a b", "a  B", "...", "???", "", "one two three four"]
    result = prints(texts)
    assert result.short == 8
    assert result.prints.column("size").to_pylist() == [2] * 8 + [2]
    sets: dict[int, set[int]] = {}
    for place, shingle in zip(
        *(result.shingles.column(name).to_pylist() for name in ("position", "shingle")), strict=True
    ):
        sets.setdefault(place, set()).add(shingle)
    same = {(a, b) for a in sets for b in sets if a < b and sets[a] & sets[b]}
    assert same == {(0, 1), (3, 4)}
    assert all(sets[a] == sets[b] for a, b in same)
    buckets = result.bands.column("position").to_pylist()
    assert [buckets.count(place) for place in range(9)] == [1] * 8 + [14]


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_minima_agree_as_often_as_the_sets_are_similar(similarity: float) -> None:
    """Within four standard deviations of what theory says, for minima and for bands."""
    members, pairs = 60, 500
    shared = round(2 * members * similarity / (1 + similarity))
    exact = shared / (2 * members - shared)
    pool = np.random.default_rng(3).integers(0, 1 << 64, (pairs, 2 * members), np.uint64)
    one, other = pool[:, :members], np.concatenate([pool[:, :shared], pool[:, members : 2 * members - shared]], axis=1)
    offsets = np.arange(0, pairs * members + 1, members)
    equal = minima(one.ravel(), offsets, 112) == minima(other.ravel(), offsets, 112)
    assert abs(equal.mean() - exact) < 4 * (exact * (1 - exact) / equal.size) ** 0.5 * 1.5
    expected = found(exact, 14, 8)
    share = equal.reshape(pairs, 14, 8).all(axis=2).any(axis=1).mean()
    assert abs(share - expected) < 4 * (expected * (1 - expected) / pairs) ** 0.5 + 0.01


def test_minima_do_not_depend_on_where_blocks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(5).integers(0, 1 << 64, 1000, np.uint64)
    offsets = np.array([0, 1, 400, 401, 999, 1000])
    whole = minima(values, offsets, 16)
    for block in (1, 7, 400, 999):
        monkeypatch.setattr("curation.fingerprint._BLOCK", block)
        assert (minima(values, offsets, 16) == whole).all()


GOLDEN = "Grüße 中文: the quick brown fox jumps over the lazy dog — twice."


def digest(result: Fingerprints) -> str:
    return hashlib.sha256(
        b"".join(
            batch.column(name).to_numpy().tobytes()
            for batch, name in ((result.prints, "size"), (result.bands, "bucket"), (result.shingles, "shingle"))
        )
    ).hexdigest()


def test_golden_fingerprints() -> None:
    """The same whatever PYTHONHASHSEED, and for letters that all of Unicode's tables have.

    A change here needs another `words.PROFILE`.
    """
    expected = "ae802662c83262ff106a887f98f7eda6a48478a07a3e66f19df0ef218a1d0efe"
    assert digest(prints([GOLDEN, "short"])) == expected
    code = "import sys; sys.path.insert(0, sys.argv[1]); from test_words import *"
    code += "; print(digest(prints([GOLDEN, 'short'])))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__)],  # noqa: PTH120
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_the_kernel_does_not_load_pandas() -> None:
    """It takes two seconds, which a small drop does not."""
    code = """
import sys
import pyarrow as pa
from curation.columns import integers, strings
from curation.fingerprint import TEXTS, Near, fingerprints
columns = [*[integers([0, 1])] * 4, strings(["one two three four five six", "short"])]
result = fingerprints(pa.RecordBatch.from_arrays(columns, schema=TEXTS), Near("word", 5, 14, 8, 800_000))
print(result.short, "pandas" in sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
