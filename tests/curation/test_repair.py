"""Unicode repair gives back what people wrote, and leaves what they meant."""

from __future__ import annotations

import sys
import time
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.identity import fold
from curation.repair import make_repair, repair_rules, repaired
from curation.stage import passages_of


def misread(text: str, encoding: str = "sloppy-windows-1252", layers: int = 1) -> str:
    repair_rules()  # which registers the encoding
    for _ in range(layers):
        text = text.encode().decode(encoding)
    return text


def passages(rows: list[int], roles: list[str | None], contents: list[str]) -> pa.RecordBatch:
    return passages_of(rows, roles, contents)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("encoding", ["sloppy-windows-1252", "latin-1"])
@pytest.mark.parametrize(
    "text", ["Das Gemüse schmeckt köstlich", "déjà vu à l’été", "“It’s here” — he said…", "日本語のテキスト"]
)
def test_misread_text_is_read_again(text: str, encoding: str, layers: int) -> None:
    assert repaired(misread(text, encoding, layers)) == (text, {"mojibake"})


def test_lines_are_read_again_one_by_one() -> None:
    text = f"naïve “quotes”\n{misread('Gemüse, süß')}"
    assert repaired(text)[0] == "naïve “quotes”\nGemüse, süß"


@pytest.mark.parametrize(
    "text",
    [
        "Ãngel and Â sign",  # words that begin like misread ones
        "in AAÂ£ and Gemüse with “curls” of misread Â£ beside right ones: ü",  # no single reading of the line
        "Ã¼ber ÅŸ and ğŸ˜€",  # Windows-1254, which is not one of the two
        "plain ascii\twith\n\nlines",
        "family 👨\u200d👩\u200d👧\u200d👦, flag 🏳️\u200d🌈",
        "می\u200cخواهم",
        "क्\u200dष and ക്\u200d",
        "ภาษา\u200bไทย",
        "ﬁne ½ ＡＢＣ x² ™",  # NFKC would change them
        "עברית\u200f and العربية",
        "İstanbul ılık",
    ],
)
def test_what_is_meant_stays(text: str) -> None:
    assert repaired(text) == (text, set())


@pytest.mark.parametrize(
    ("text", "mended", "what"),
    [
        ("a\r\nb\rc", "a\nb\nc", {"new_lines"}),
        ("bell\x07 and\x1b[0m \x80tab\t", "bell and[0m tab\t", {"controls"}),
        ("one\x0ctwo\x85three\x1ffour", "one\ntwo\nthree four", {"new_lines", "controls"}),
        ("\ufeffsoft\u00adhy\u200bphen\u2060s\u200d", "softhyphens", {"unseen"}),
        ("cafe\u0301", "café", {"composed"}),
        ("cafe\u00ad\u0301", "café", {"unseen", "composed"}),
        ("lost \ufffd", "lost \ufffd", {"lost"}),
        ("👨\u200d\u200d👩", "👨\u200d👩", {"unseen"}),
        ("a" + "\u0316\u0301" * 20, "a" + "\u0316\u0301" * 20, {"not_composed"}),
    ],
)
def test_what_is_mended(text: str, mended: str, what: set[str]) -> None:
    assert repaired(text) == (mended, what)


def test_words_that_any_white_space_parts_stay_apart() -> None:
    """Keys take it for white space: copies that differ in it alone must stay copies."""
    spaces = [char for char in map(chr, range(sys.maxunicode + 1)) if char.isspace()]
    assert {"\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85"} < {*spaces}
    for space in spaces:
        mended, _ = repaired(f"one{space}two")
        assert fold(mended) == "one two", hex(ord(space))
        assert space == "\t" or unicodedata.category(mended[3]) != "Cc" or mended[3] == "\n"


@given(st.text())
def test_the_result_is_text_without_control_characters(text: str) -> None:
    mended, what = repaired(text)
    assert all(char in "\t\n" or unicodedata.category(char) != "Cc" for char in mended)
    assert "not_composed" in what or unicodedata.is_normalized("NFC", mended)


texts = st.text(alphabet="aé\u0301\u00ad\u200d\r\n\x07Ã©\ufffd", max_size=8)


@given(st.lists(st.lists(texts, min_size=1, max_size=3), max_size=6), st.integers(0, 6))
def test_any_cut_into_batches_gives_the_same(rows: list[list[str]], cut: int) -> None:
    stage = make_repair(repair_rules())

    def through(part: list[list[str]]) -> tuple[list[str], dict[str, int]]:
        flat = [(at, "user", text) for at, row in enumerate(part) for text in row]
        staged = stage(passages(*map(list, zip(*flat, strict=True))) if flat else passages([], [], []))
        assert staged.refused.num_rows == 0
        return staged.passages.column("content").to_pylist(), dict(staged.counts)

    contents, counts = through(rows)
    (first, some), (second, others) = through(rows[:cut]), through(rows[cut:])
    assert contents == first + second
    assert counts == {name: some.get(name, 0) + others.get(name, 0) for name in {*some, *others}}


def test_rows_are_counted_once() -> None:
    batch = passages([0, 0, 1, 2], ["user", "assistant", None, None], ["a\r\n", "b\r\n\x07", "ok", "\ufffd"])
    staged = make_repair(repair_rules())(batch)
    assert staged.counts == {
        "unicode_repaired": 1,
        "unicode_new_lines": 1,
        "unicode_controls": 1,
        "unicode_lost": 1,
    }
    assert staged.passages.column("content").to_pylist() == ["a\n", "b\n", "ok", "\ufffd"]


@pytest.mark.parametrize(
    "text",
    [
        "a\u0300\u0316" * 300_000,
        "a" + "\u0300\u0316" * 500_000,
        "\ufffd" * 1_000_000,
        "Ã©" * 500_000,
        "Ã" * 1_000_000,
        "\u200d" * 1_000_000,
        "\r" * 1_000_000,
    ],
    ids=range(7),
)
def test_hostile_text_costs_a_multiple_of_its_length(text: str) -> None:
    def cost(some: str) -> float:
        start = time.process_time()
        repaired(some)
        return time.process_time() - start

    cost(text[:1000])
    assert cost(text) < 40 * max(cost(text[: len(text) // 10]), 0.01)
