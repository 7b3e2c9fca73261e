"""Each rule on quality on both sides of its threshold, switched off, over any cut, and through a whole drop."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import curation
from curation.c4 import C4, clean_lines
from curation.gopher import Gopher, Repetition
from curation.plan import make_rules
from curation.quality import Quality, make_quality
from curation.reasons import Filtered, mend
from curation.stage import Staged, passages_of
from dropforge.dataset import Manifest
from dropforge.errors import DataError, RecipeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

NO_GOPHER = Gopher(**{name: None for name in asdict(Gopher()) if name != "stop_words"})
NO_REPETITION = Repetition(None, None, None, None, (None,) * 3, (None,) * 6)
NO_C4 = C4(False, None, None, False, False, False, False, False, None)


def distinct(count: int) -> str:
    """Words that occur once."""
    return " ".join(f"word{n}" for n in range(count))


def staged(quality: Quality, *rows: str | list[tuple[str, str]]) -> Staged:
    flat = [
        (at, role, said)
        for at, row in enumerate(rows)
        for role, said in ([(None, row)] if isinstance(row, str) else row)
    ]
    columns = list(zip(*flat, strict=True)) or [(), (), ()]
    return make_quality(quality)(passages_of(*columns))


def ends(quality: Quality, *rows: str | list[tuple[str, str]]) -> dict[int, str]:
    return {item["row"]: item["reason"] for item in staged(quality, *rows).refused.to_pylist()}


def repeated(size: int, times: int, rest: int, apart: str = " ") -> str:
    """A run of words of one character `times` times, each followed by others of one character, then other words."""
    run = " ".join(map(chr, range(0x100, 0x100 + size)))
    others = iter(range(0x400, 0x5000))
    parts = [f"{run} {chr(next(others))}" for _ in range(times)]
    return apart.join([*parts, *(chr(next(others)) for _ in range(rest))])


GOPHER = [  # setting, value, what passes just so, what does not
    ("min_words", 50, distinct(50), distinct(49)),
    ("max_words", 100_000, distinct(100_000), distinct(100_001)),
    ("min_mean_word_length", 3_000_000, "ab abcd", "ab abc"),
    ("max_mean_word_length", 10_000_000, "a" * 10, "a" * 10 + " " + "b" * 11),
    ("max_hashes", 100_000, distinct(9) + " #", distinct(8) + " #"),
    ("max_ellipses", 100_000, distinct(9) + " a...", distinct(8) + " a…"),
    ("max_bullet_lines", 900_000, "• a\n" * 9 + "b", "• a\n" * 10 + "b"),
    ("max_ellipsis_lines", 300_000, "a...\n" * 3 + "b\n" * 7, "a…\n" * 4 + "b\n" * 9),
    ("min_alphabetic_words", 800_000, "a b c d 5", "a b c 4 5"),
    ("min_stop_words", 2, "The dog to", "the the dog"),
]
GOPHER_CODES = {
    "min_words": "gopher_few_words",
    "max_words": "gopher_many_words",
    "min_mean_word_length": "gopher_mean_word_length",
    "max_mean_word_length": "gopher_mean_word_length",
    "min_alphabetic_words": "gopher_alphabetic_words",
    "min_stop_words": "gopher_stop_words",
}


@pytest.mark.parametrize(("name", "value", "good", "bad"), GOPHER)
def test_gophers_rules_on_quality(name: str, value: int, good: str, bad: str) -> None:
    only = replace(NO_GOPHER, **{name: value})
    assert getattr(Gopher(), name) == value  # as published
    code = GOPHER_CODES.get(name, f"gopher_{name.removeprefix('max_')}")
    assert ends(Quality(only), good, bad, good) == {1: code}
    assert ends(Quality(NO_GOPHER), good, bad) == {}


REPETITION = [
    ("duplicate_lines", 300_000, "a\n" * 4 + "b\nc\nd\ne\nf\ng", "a\n" * 5 + "b\nc\nd\ne\nf\ng"),
    (
        "duplicate_paragraphs",
        300_000,
        "a\n\n" * 4 + "b\n\nc\n\nd\n\ne\n\nf\n\ng",
        "a\n\n" * 5 + "b\n\nc\n\nd\n\ne\n\nf",
    ),
    ("duplicate_line_characters", 200_000, "ab\nab\nabcdef", "ab\nab\nabcde"),
    ("duplicate_paragraph_characters", 200_000, "ab\n\nab\n\nabcdef", "ab\n\nab\n\nabcde"),
    ("top_2_gram", 200_000, repeated(2, 2, 14), repeated(2, 2, 13)),
    ("top_3_gram", 180_000, repeated(3, 3, 38), repeated(3, 3, 37)),
    ("top_4_gram", 160_000, repeated(4, 2, 40), repeated(4, 2, 39)),
    ("duplicate_5_gram", 150_000, repeated(5, 4, 76), repeated(5, 4, 75)),
    ("duplicate_6_gram", 140_000, repeated(6, 8, 244), repeated(6, 8, 243)),
    ("duplicate_7_gram", 130_000, repeated(7, 14, 588), repeated(7, 14, 587)),
    ("duplicate_8_gram", 120_000, repeated(8, 4, 164), repeated(8, 4, 163)),
    ("duplicate_9_gram", 110_000, repeated(9, 12, 780), repeated(9, 12, 779)),
    ("duplicate_10_gram", 100_000, repeated(10, 2, 78), repeated(10, 2, 77)),
]


@pytest.mark.parametrize(("name", "value", "good", "bad"), REPETITION)
def test_gophers_rules_on_repetition(name: str, value: int, good: str, bad: str) -> None:
    whole = Repetition()
    if name.endswith("_gram"):
        place, group = int(name.split("_")[1]), "max_top_grams" if name.startswith("top") else "max_duplicate_grams"
        at = place - (2 if name.startswith("top") else 5)
        published = getattr(whole, group)
        only = replace(NO_REPETITION, **{group: tuple(value if n == at else None for n in range(len(published)))})
        assert published[at] == value
    else:
        only = replace(NO_REPETITION, **{f"max_{name}": value})
        assert getattr(whole, f"max_{name}") == value
    assert ends(Quality(gopher_repetition=only), good, bad, good) == {1: f"gopher_{name}"}
    assert ends(Quality(gopher_repetition=NO_REPETITION), good, bad) == {}


LINES = [
    ("terminal_punctuation", True, "no_terminal_punctuation", "This one ends.", "This one does not"),
    ("terminal_punctuation", True, "no_terminal_punctuation", 'He said "yes"', "And so on..."),
    ("terminal_punctuation", True, "no_terminal_punctuation", "これは文です。", "これは文"),
    ("min_words", 3, "few_words", "a b c", "a b"),
    ("max_word_characters", 1000, "long_word", "a" * 1000, "a" * 1001),
    ("javascript", True, "javascript", "Java script", "enable JavaScript now"),
    ("policies", True, "policies", "our policy", "Our Privacy Policy here"),
]


@pytest.mark.parametrize(("name", "value", "reason", "good", "bad"), LINES)
def test_c4s_rules_on_lines(name: str, value: Any, reason: str, good: str, bad: str) -> None:
    rules = replace(NO_C4, **{name: value})
    assert getattr(C4(), name) == value
    cleaned = clean_lines(f"{good}\n{bad}\n\n{bad}\n\n{good}", rules)
    assert cleaned.text == f"{good}\n\n{good}"
    assert cleaned.counts == {f"c4_lines_{reason}": 2}
    assert clean_lines(bad, NO_C4).text == bad


def test_what_c4_wants_stays_to_the_byte() -> None:
    text = "\n\n  One is here. \n\n\nTwo is here.\r\n"
    assert clean_lines(text, C4()).text == text
    assert clean_lines("A fact.[12] Or not.[citation needed]", C4()).text == "A fact. Or not."


def test_c4s_rules_on_rows() -> None:
    five = "One is one. Two is two! Three, is it? Four at 4.5 m. Five is it."
    rows = [
        five,
        five.replace("Four at 4.5 m", "Four"),
        five.replace("Five is it.", ""),
        five + " {",
        five + " Lorem ipsum.",
    ]
    assert ends(Quality(c4=C4()), *rows, "no line stays") == {
        2: "c4_few_sentences",
        3: "c4_curly_bracket",
        4: "c4_lorem_ipsum",
        5: "c4_no_lines",
    }
    assert ends(Quality(c4=NO_C4), *rows, "no line stays") == {}


def test_a_conversation_is_judged_by_its_answers_or_by_all() -> None:
    short = replace(NO_GOPHER, min_words=3)
    talk = [("user", "why so?"), ("assistant", "for this")]
    other = [("user", "one two three"), ("assistant", "no")]
    asked = [("user", "a question without answer")]
    assert ends(Quality(short), talk, other, asked) == {0: "gopher_few_words", 1: "gopher_few_words"}
    assert ends(Quality(short, of="all"), talk, other, asked) == {}


def test_a_text_that_came_empty_has_no_line_to_lose() -> None:
    """Of an answer that only calls a tool."""
    five = "One is one. Two is two! Three, is it? Four at 4.5 m. Five is it."
    called = [("user", "so?"), ("assistant", ""), ("tool", "4.5"), ("assistant", five)]
    assert ends(Quality(c4=C4()), called, [*called[:3], ("assistant", "no line stays")]) == {1: "c4_no_lines"}


def test_only_answers_lose_lines() -> None:
    rules = Quality(c4=replace(NO_C4, min_words=3))
    done = staged(rules, [("user", "hi you"), ("assistant", "ok\nit is so"), ("user", "so"), ("assistant", "it is so")])
    assert done.passages.column("content").to_pylist() == ["hi you", "it is so", "so", "it is so"]
    assert done.counts == {"c4_lines_few_words": 1, "c4_texts_changed": 1}
    assert ends(rules, [("user", "hi"), ("assistant", "it is so"), ("user", "x"), ("assistant", "ok")]) == {
        0: "c4_no_lines"
    }


def test_scripts_without_spaces_are_judged_by_characters() -> None:
    text = "これは日本語の文章です。" * 5
    assert ends(Quality(replace(Gopher(), min_stop_words=None)), text) == {}


piece = st.sampled_from(
    ["the dog and", "a", "• x", "so...", "One is.", "\n", "\n\n", "{", "漢字", "# #", "the dog and"]
)
row = st.lists(piece, min_size=1, max_size=12).map(" ".join)
EVERYTHING = Quality(
    replace(Gopher(), min_words=4), Repetition(), replace(C4(), min_sentences=1, curly_bracket=False), of="all"
)


@settings(deadline=None)
@given(st.lists(row, max_size=6), st.integers(0, 6))
def test_any_cut_into_batches_gives_the_same(rows: list[str], cut: int) -> None:
    whole, first, second = (staged(EVERYTHING, *part) for part in (rows, rows[:cut], rows[cut:]))
    texts = [part.passages.column("content").to_pylist() for part in (whole, first, second)]
    assert texts[0] == texts[1] + texts[2]
    refused = [part.refused.to_pylist() for part in (whole, first, second)]
    assert refused[0] == refused[1] + [{**item, "row": item["row"] + min(cut, len(rows))} for item in refused[2]]
    names = {*first.counts, *second.counts}
    assert whole.counts == {name: first.counts.get(name, 0) + second.counts.get(name, 0) for name in names}


def test_every_code_has_a_mend_that_names_a_key_of_the_recipe(recipe: Callable[..., Recipe]) -> None:
    full = recipe(quality={"gopher": {}, "gopher_repetition": {}, "c4": {}}, language={"keep": ["en"]}, pii={})
    for code in set(Filtered) - {Filtered.FORGOTTEN}:  # asked for by a command
        keys = [part for part in mend(code).split("`") if part.startswith("curation.")]
        assert keys
        for key in keys:
            value: Any = full
            for name in key.split("."):
                value = getattr(value, name)


def test_nothing_under_the_digest_is_a_float(recipe: Callable[..., Recipe]) -> None:
    asked = recipe(
        quality={"gopher": {}, "gopher_repetition": {}, "c4": {}}, unicode="repair", language={"keep": ["en"]}
    )
    facts = make_rules(asked).facts()
    assert facts["quality"]["gopher"]["max_hashes"] == 100_000
    assert facts["repair"]["mojibake"].startswith("ftfy 6.3.")
    assert {facts[name]["unicode"] for name in ("quality", "repair", "language")} == {unicodedata.unidata_version}
    assert json.loads(json.dumps(facts)) == facts

    def leaves(value: Any) -> list[Any]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]

    assert not any(isinstance(leaf, float) for leaf in leaves(facts))
    assert not {"quality", "repair", "language"} & make_rules(recipe()).facts().keys()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "names no rules"),
        ({"gopher": {"min_words": 10, "max_words": 9}}, "min_words"),
        ({"gopher": {"stop_words": ["le", "la"], "min_stop_words": 3}}, "3 of 2 stop words"),
    ],
)
def test_rules_that_cannot_work_are_refused(recipe: Callable[..., Recipe], values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(quality=values)


def lines(*texts: str) -> bytes:
    return b"\n".join(json.dumps({"text": text}).encode() for text in texts)


def test_a_drop_ends_its_filtered_rows_in_the_ledger(
    make: Callable[..., Manifest],
    ledger: Callable[[Manifest], list[dict[str, Any]]],
    rows: Callable[..., list[dict[str, Any]]],
    store: FolderStore,
    recipe: Callable[..., Recipe],
) -> None:
    good = [f"The row of number {n} has words and it ends like that." for n in range(30)]
    bad = ["too short it is.", "same words " * 10]
    data = lines(*good, *bad) + b"\nno json\n" + lines(f"{good[0]}\nmenu")
    rules = {"gopher": {"min_words": 5}, "gopher_repetition": {}, "c4": {"min_sentences": 1}}
    manifest = make({"a.jsonl": data}, quality=rules)
    found = {name: n for name, n in manifest.counts.items() if name not in {"train", "eval"}}
    # The row that lost its menu is a copy of another then.
    assert found == {"input": 34, "bad_json": 1, "gopher_few_words": 1, "gopher_stop_words": 1, "duplicate": 1}
    assert sum(row["end"].startswith("gopher_") for row in ledger(manifest)) == 2
    assert not any("menu" in row["text"] for row in rows(manifest))
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["statistics"]["touched"]["c4_lines_no_terminal_punctuation"] == 1
    page = store.get(manifest.files["card_html"]).decode()
    assert all(said in page for said in ("2 filtered", "gopher_few_words", "curation.quality.gopher.min_words"))
    assert "1 quarantined" in page
    curation.check(manifest, recipe(quality=rules, max_quarantined=0.05))
    with pytest.raises(DataError, match=r"few rows filtered.*5\.88%.*curation\.max_filtered"):
        curation.check(manifest, recipe(quality=rules, max_filtered=0.05))


def test_a_drop_of_which_nothing_stays_names_the_rules(make: Callable[..., Manifest]) -> None:
    with pytest.raises(DataError) as caught:
        make({"a.jsonl": lines("a b", "c d", "{ " * 20)}, quality={"gopher": {"min_words": 5}})
    for said in ("none of 3 rows", "gopher_few_words (2 rows)", "gopher_mean_word_length 1", "gopher.min_words"):
        assert said in str(caught.value)


def test_repair_comes_before_the_keys(make: Callable[..., Manifest], rows: Callable[..., list[dict[str, Any]]]) -> None:
    texts = [f"Zeile {n} über Gemüse" for n in range(20)]
    misread = [text.encode().decode("latin-1") for text in texts[:5]]
    manifest = make({"a.jsonl": lines(*texts, *misread, "a <|im_\u200bend|> b")}, unicode="repair")
    assert manifest.counts["duplicate"] == 5
    held = {row["text"] for row in rows(manifest)}
    assert held == {*texts, "a < |im_end|> b"}


def test_the_number_of_workers_changes_nothing(
    store: FolderStore, upload: Callable[..., Any], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    files = {
        f"{n}.jsonl": lines(*[f"Certainly the number {n} {m} means what they have written." for m in range(20)], "ab")
        for n in range(3)
    }
    drop = upload(files)
    digests = set()
    for workers in (1, 3):
        asked = recipe(quality={"gopher": {"min_words": 4}}, unicode="repair", workers=workers)
        digests.add(curation.curate(store, drop, asked, workdir=tmp_path / str(workers)).digest)
    assert len(digests) == 1
