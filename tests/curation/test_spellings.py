"""A label, source or group has one name, whichever program wrote its value and in whatever type."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import curation
from curation.canonical import canonical, group_of
from curation.forgotten import Forgotten
from curation.gate import checks
from curation.identity import document
from curation.mapping import Columns
from curation.reasons import Reason, RejectError
from curation.spellings import (
    LONGEST_UNSET,
    alike,
    dated,
    made_of_others,
    mixed_truths,
    numbers_and_names,
    truths_among,
    unset,
    value_name,
)
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]
CLASSES = {"task": "classification"}


def lines(**columns: list[Any]) -> bytes:
    texts = [f"row {n} of the test" for n in range(len(next(iter(columns.values()))))]
    named = {"text": texts, **columns}
    rows = (dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True))
    return "\n".join(map(json.dumps, rows)).encode()


def parquet(start: int, **columns: Any) -> bytes:
    rows = len(next(iter(columns.values())))
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {n} of {start}" for n in range(rows)], **columns}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((1, 1.0, "1", "1.0", b"1", Decimal(1), Decimal("1.00"), 1e0), "1"),
        ((0, -0.0, 0.0, "0", "0.0", "-0.0", Decimal("-0.00")), "0"),
        ((-3, -3.0, "-3.0"), "-3"),
        ((10**16, 1e16, "1e+16", "10000000000000000"), "10000000000000000"),
        ((1.5, "1.5", Decimal("1.50")), "1.5"),
        ((2**53 + 1, str(2**53 + 1), f"{2**53 + 1}.0"[:-2], Decimal(2**53 + 1)), "9007199254740993"),
        ((True, "true"), "true"),
        ((float("nan"), "nan", "NaN", "<NA>", None), None),
    ],
)
def test_a_value_has_one_name_in_every_spelling_and_type(values: tuple[Any, ...], name: str | None) -> None:
    assert [value_name(value) for value in values] == [name] * len(values)


@pytest.mark.parametrize(
    "text",
    ["01", "00.0", "01.0", "1.10", "1.00", "+1", "1.", ".0", " 1.0", "1.0 ", "v1.0", "1e16", "1e+16x", "-0", "1,0",
     "１.0", "9007199254740993.0", "True", "none", "None", "nano", "Nan", "inf", "1_0.0", "1.0\n", "9" * 400 + ".0"],
)  # fmt: skip
def test_what_no_program_writes_for_a_number_stays_as_it_is_written(text: str) -> None:
    assert value_name(text) == text


def test_structures_and_dates_have_the_name_that_they_have_as_text() -> None:
    assert value_name({"b": 1.0, "a": [True, None]}) == '{"a": [true, null], "b": 1.0}'
    day = pa.array([0], pa.date32()).to_pylist()[0]
    assert value_name(day) == "1970-01-01"


@pytest.mark.parametrize(
    ("labels", "made"),
    [
        ("spam ham spam|ham", "spam|ham"),
        ("action,comedy comedy,drama action,drama drama", "action,comedy comedy,drama action,drama"),
        ("a|b b|c c|a", "a|b b|c c|a"),
        ("Portland,OR Salem,OR Austin,TX Portland,ME", ""),
        ("Food|Fruit Food|Meat Tools|Saws", ""),
        ("Food|Fruit", ""),
    ],
)
def test_labels_that_are_several_in_one_are_found(labels: str, made: str) -> None:
    assert list(made_of_others(dict.fromkeys(labels.split(), 1))) == made.split()


def test_numbers_with_spaces_between_are_several_labels_and_words_a_name() -> None:
    assert made_of_others({"3": 1, "10": 2, "3 10": 3}) == {"3 10": 3}
    assert made_of_others({"spam": 1, "ham": 2, "spam ham": 3}) == {}


@pytest.mark.parametrize("value", [b"\xff", [b"\xff"], {"a": {"b": b"\xff"}}, {b"\xff": 1}, {date(1970, 1, 1): 1}])
@pytest.mark.parametrize("name", ["label", "source", "group"])
def test_bytes_that_are_no_text_name_nothing(name: str, value: Any) -> None:
    with pytest.raises(
        RejectError, match=f"`{name}` holds (bytes that are not UTF-8|an object whose keys are no text)"
    ):
        canonical({"text": "some text", name: value})
    assert group_of({"group": value, "group_id": 7}) == "7"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('["spam", "ham"]', "a list of 2"),
        (' {"choices": ["spam"]}', "an object"),
        ("[1, 2]", "a list of 2"),
        ("['spam', 'ham']", "several values"),
        ("['spam' 'ham']", "several values"),
        ("[ 3 10]", "several values"),
        ("[0. 1. 0.]", "several values"),
        ("{'choices': ['spam']}", "several values"),
        ("(b'spam', 'ham')", "several values"),
        ("{spam,ham}", "several values"),
    ],
)
def test_a_list_of_classes_as_text_is_no_class(text: str, held: str) -> None:
    with pytest.raises(RejectError, match=rf"`label` is text that holds {held}, and a class is one") as error:
        canonical({"text": "some text", "label": text}, labels=True)
    assert error.value.reason == Reason.BAD_FIELD
    assert canonical({"text": "some text", "label": text}).label == text


@pytest.mark.parametrize(
    "text", ["['spam']", '["spam"]', "('spam',)", "{spam}", "[a], b", "[CLS], [SEP]", "[1]", "(a, b)"]
)
def test_one_class_in_brackets_is_one(text: str) -> None:
    assert canonical({"text": "some text", "label": text}, labels=True).label == text


def test_labels_of_all_types_and_formats_are_one_class(make: Make, rows: Rows) -> None:
    one: list[Any] = [1, 1.0, "1", "1.0"]
    zero: list[Any] = [0, 0.0, "0", "-0.0"]
    files = {
        "a.jsonl": lines(label=(one + zero) * 5),
        "b.csv": ("text,label\n" + "".join(f"line {n},{n % 2}.0\n" for n in range(20))).encode(),
        "c.parquet": parquet(1, label=pa.array([0, 1] * 10, pa.int8())),
        "d.parquet": parquet(2, label=pa.array([0, 1] * 10, pa.float32())),
        "e.parquet": parquet(3, label=pa.array([Decimal("0.0"), Decimal("1.0")] * 10, pa.decimal128(5, 1))),
        "f.parquet": parquet(4, label=pa.array(["0.0", "1.0"] * 10).dictionary_encode()),
    }
    found = rows(make(files, **CLASSES))
    assert sorted({row["label"] for row in found}) == ["0", "1"]
    assert len(found) == 140


def test_a_float_of_32_bits_is_the_number_that_was_written(make: Make, rows: Rows) -> None:
    scores = [0.1, 2.7] * 10
    narrow = {"score": pa.array(scores, pa.float32()), "tags": pa.array([[0.3]] * 20, pa.list_(pa.float32()))}
    files = {
        "a.jsonl": lines(label=scores),
        "b.parquet": parquet(1, label=pa.array(scores, pa.float32()), **narrow),
        "c.parquet": parquet(2, label=pa.array([str(score) for score in scores])),
    }
    found = rows(make(files, data={"keep_columns": ["score", "tags"]}, **CLASSES))
    assert Counter(row["label"] for row in found) == {"0.1": 30, "2.7": 30}
    assert {row["extras"] for row in found} - {None, "{}"} == {f'{{"score":{n},"tags":[0.3]}}' for n in (0.1, 2.7)}


def test_groups_and_sources_are_one_too_and_large_numbers_stay_apart(make: Make, rows: Rows) -> None:
    near = [2**53, 2**53 + 1]
    groups: list[Any] = [7, 7.0, "7", "7.0", "07", near[0], near[1], str(near[1]), float("9e15"), "9000000000000000"]
    sources: list[Any] = [3, 3.0, "3", "3.0", "03", "x", "x", None, "nan", ""]
    data = lines(group=groups * 3, source=sources * 3)
    made = make({"a.jsonl": data}, prefer=["3.0"], max_rows_per_source={"3.0": 5, "3": 6})
    found = rows(made)
    assert {row["group"] for row in found} <= {"7", "07", *map(str, near), "9000000000000000"}
    assert {row["source"] for row in found} == {"3", "03", "x", "a.jsonl"}
    assert sum(row["source"] == "3" for row in found) == 5
    sides: dict[str, set[str]] = {}
    for row in found:
        sides.setdefault(row["group"], set()).add(row["split"])
    assert all(len(split) == 1 for split in sides.values())
    assert made.rules["max_rows_per_source"] == [["3", 5]]


def test_nan_is_no_label(make: Make, store: FolderStore) -> None:
    labels = pa.array([0.0, 1.0, float("nan"), None] * 10, pa.float64())
    made = make({"a.parquet": parquet(0, label=labels)}, **CLASSES)
    assert made.counts["no_label"] == 20
    quarantine = store.get(made.files["quarantine"]).decode()
    assert quarantine.count("`label` is NaN, which is no value") == 10


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([True, False, 1, 0], r"0 \(10 rows\), 1 \(10 rows\), false \(10 rows\), true \(10 rows\)"),
        ([True, 0.0], r"0 \(20 rows\), true \(20 rows\)"),
        ([True, "True", False, "False"], r"False .*True .*false .*true"),
        (["TRUE", "true"], r"TRUE \(20 rows\), true \(20 rows\)"),
        ([1, 2, 3, "True"], r"1 \(10 rows\), True \(10 rows\)"),
        ([True, False, "t", "f"], r"f \(10 rows\), false \(10 rows\), t \(10 rows\), true \(10 rows\)"),
        (["WAHR", "FALSCH", "yes", "no", "NULL"], r"FALSCH .*WAHR .*no .*yes"),
    ],
)
def test_truth_values_in_several_spellings_stop_a_classifier_with_the_spellings(
    make: Make, recipe: Callable[..., Recipe], store: FolderStore, labels: list[Any], told: str
) -> None:
    made = make({"a.jsonl": lines(label=labels * (40 // len(labels)))}, **CLASSES)
    with pytest.raises(DataError, match=rf"rule `labels have one spelling`.*several ways: {told}.*0 and 1"):
        curation.check(made, recipe(**CLASSES))
    card = json.loads(store.get(made.files["card_json"]))
    assert any("truth values are spelled in several ways" in line for line in card["warnings"])
    # Where nobody learns labels, they are told alone.
    assert all(check.ok for check in checks(made, recipe()))


def test_truth_values_in_one_spelling_and_other_labels_pass(make: Make, recipe: Callable[..., Recipe]) -> None:
    for number, labels in enumerate(([True, False], ["True", "False"], [1, 0], ["yes", "no"], [1, 2, "high"])):
        made = make({"a.jsonl": lines(label=labels * 20)}, f"d{number}", **CLASSES)
        assert all(check.ok for check in checks(made, recipe(**CLASSES)))
    assert mixed_truths({"0": 1, "1": 2, "7": 3}) == {}
    assert mixed_truths({"N": 1, "T": 2}) == {}  # normal and tumour
    letters = dict.fromkeys("01fnty", 1)
    assert truths_among(letters, 30) == {"0": 1, "1": 1}
    assert mixed_truths(truths_among(letters, 0)) == letters


def test_labels_that_may_be_one_or_none_are_told(make: Make, store: FolderStore) -> None:
    labels = ["spam", "Spam", " spam", "1.5", "1,5", "1.50", "\\N", "NULL", "ham", "true", "false", "３", "3"]
    card = json.loads(store.get(make({"a.jsonl": lines(label=labels * 3)}, **CLASSES).files["card_json"]))
    told = [line for line in card["warnings"] if line.startswith("labels: ")]
    assert told == [
        "labels: one value, or several? ' spam' (3 rows), Spam (3 rows), spam (3 rows)",
        "labels: one value, or several? 1,5 (3 rows), 1.5 (3 rows), 1.50 (3 rows)",
        "labels: one value, or several? 3 (3 rows), ３ (3 rows)",
        "labels: programs write so what is missing: NULL (3 rows), \\N (3 rows)",
    ]
    ways = [
        "spam",
        "spam\u200b",
        "\ufeffspam",
        "spam\u200e",
        "[spam]",
        "{spam}",
        "b'spam'",
        "['spam']",
        "('spam',)",
        '"spam"',
    ]
    assert alike({**dict.fromkeys(ways, 1), "[]": 1, "(spam": 1}) == [dict.fromkeys(ways, 1)]
    assert alike({"-1": 1, "\u22121": 1, "1": 1, "Yes": 1, "yes": 1}) == [{"-1": 1, "\u22121": 1}, {"Yes": 1, "yes": 1}]
    assert alike({"true": 1, "True": 1, "a": 1, "b": 2, "nan": 1, "inf": 1}) == []


def test_classes_that_programs_name_otherwise_are_told_and_numbers_grades_and_scales_are_not() -> None:
    for ways in (
        ["not_spam", "not spam", "not-spam", "notSpam", "not  spam", "not\u2011spam"],
        ["İptal", "iptal", "IPTAL"],  # of Turkish
        ["IŞIK", "ışık"],
        ["ΘΕΤΙΚΟ", "Θετικό"],  # Greek capitals have no accents
        ["\u2764", "\u2764\ufe0f"],  # a heart, and one that is drawn in colour
        ["LABEL_0", "0", "label 0"],
        ["spam", "s\u0440\u0430m", "S\u0420AM"],  # with letters of Cyrillic
        ["COP", "\u0421\u041e\u0420", "\u0441\u043e\u0440"],
        ["step 1", "step_1", "Step1"],
        ["3D", "3-d"],
        ["News - World", "News-World"],
        ["R&D", "R&amp;D", "r&d"],
        ["7", '="7"', '="07"'],
        ["__label__up", "up"],
        ["1,000", "1000", "1000.0"],
        ["50%", "50 %", "50.0%", "50.00 %"],
        ["18-24", "18\u201324", "18 - 24"],
        ["18-24 years", "18\u201324 years"],
        ["1,000-5,000", "1000-5000"],
        ["$1,000", "$1000", "$ 1000.00"],
        ["5 \u20ac", "5,00 \u20ac"],
        [">=50K", ">= 50K", "\u226550K"],
        ["$25K-$50K", "$25K - $50K"],
        ["Under $25,000", "under $25000"],
        ["90°", "90 °"],
        ["<5 %", "< 5%"],
        ["65+", "65 +"],
        ["Level 1", "Level 01", "level_1"],
        ["2026-01-02 12:00:00", "2026-01-02T12:00:00Z", "2026-01-02T12:00:00.000+00:00", "2026-01-02 12:00:00 UTC"],
        ["2026-01-02 12:00:00.5", "2026-01-02T12:00:00.500Z"],
        ["up", "up.", "**Up**", "`up`", "Label: up", "label: **Up**.", "<label>up</label>", "#up", "\u201cup\u201d"],
        ["A", "A.", "A)", "(A).", "Option A", "Answer: a"],  # as people and language models write labels
        ["don't", "don\u2019t"],
        ["a / b", "a/b"],
        ["a: b", "A:b"],
        ["7", "'7", "7.0"],
        ["https://a.b/c", "https://www.a.b/c/", "http://a.b/c"],
        ["mailto:ann@x.org", "Ann@x.org"],
        ["a%20b", "a b"],
        ["M\u00c3\u00bcll", "M\u00fcll", "Muell", "MU\u0308LL"],  # the first is UTF-8 that was read as Latin-1
        ["5 stars", "5", "5-star", "\u2605\u2605\u2605\u2605\u2605"],
        ["3", "\u2605\u2605\u2605\u2606\u2606", "\u2b50\ufe0f\u2b50\u2b50", "3rd"],
        ["4/5", "4 of 5", "4 out of 5", "4 / 5"],
        ["2026-01-05", "2026/1/5", "05.01.2026", "5 January 2026", "Jan. 5th, 2026", "5-Jan-2026"],
        ["2026-01-25", "25/01/2026"],
        ["1", "1 - low"],
        ["1", "1. low"],
        ["low", "1: low"],
        ["spam", "spam\nIt sells."],
        ["POS", "Sentiment.POS"],  # a member of an enumeration
        ["A01", "A01: Cholera"],
        ["1", "tensor(1)", "np.int64(1)", "Decimal('1')"],
        ["spam", "np.str_('spam')"],
        ["Home > Garden", "Home/Garden", "home | garden"],
        ["abcdef12-3456-7890-abcd-ef1234567890", "ABCDEF1234567890ABCDEF1234567890"],
        ["Привет", "Привет".encode().decode("cp1251")],
        ["Höher", "Höher".encode().decode("mac_roman"), "H\u00c3\u00b6her"],
        ["Höher", "H?her"],
    ):
        assert alike(dict.fromkeys([*ways, "other"], 1)) == [dict.fromkeys(ways, 1)]
    others = [
        "A",
        "A-",
        "A+",
        "1-2",
        "1_2",
        "12",
        "1 2",
        "3-4 stars",
        "34 stars",
        "temp 1",
        "temp -1",
        "C",
        "C++",
        "_",
        "&",
        "&&",
    ]
    others += ["05/01/2026", "2026-01-05", "2026-05-01", "first", "1st of may", "may", "3/5", "3/4"]
    others += ["1.5", "0", "1:30", "1 day", "spam", "spam - it sells", "2 = b"]
    others += ["A*", "C#", "A. Smith", "B. Smith", "1. League", "2. League", "net", ".net", "1, 2", "9:30", "930", "5!"]
    others += [
        "18-25",
        "1825",
        "10%",
        "1%",
        "$5",
        "5$",
        "5 kg",
        "5 g",
        ">5",
        "<5",
        ">=5",
        "E10",
        "E1",
        "1.2.3",
        "1.23 x",
    ]
    others += ["'", "''", "**", "#", "12345678901234567890", "12345678901234567891", "1.2", "123"]  # ids are no floats
    others += ["2026-01-02", "2026-01-02 12:00:01", "2026-01-02T12:00:01+02:00", "2026-01-02 12:00:10", "2,50", "250"]
    assert alike(dict.fromkeys(others, 1)) == []
    for labels, missing in (
        (["-", "neutral", "entailment"], "-"),  # SNLI
        (["-1", "0", "1", "2"], "-1"),  # datasets
        (["-1", "0", "1"], None),
        (["-", "+"], None),
        (["-2", "-1", "0", "1", "2"], None),
        (["-1", "1", "2", "3"], None),
    ):
        assert unset(dict.fromkeys(labels, 1)) == ({missing: 1} if missing else {})


def test_what_excel_has_taken_for_dates_is_told(make: Make, store: FolderStore) -> None:
    labels = ["5-Jan", "10-Jun", "18-24", "25-34"]
    card = json.loads(store.get(make({"a.jsonl": lines(label=labels * 3)}, **CLASSES).files["card_json"]))
    told = (
        "labels: Excel writes so what it takes for a date; import the column as text: 10-Jun (3 rows), 5-Jan (3 rows)"
    )
    assert told in card["warnings"]
    for days in (["1-Mar", "2-Sep"], ["05. Jan", "Mrz 18"], ["Oct-15", "Dez 01"]):
        genes = [f"TP{number}" for number in range(18)]
        assert (
            dated(dict.fromkeys([*days, *genes], 1))
            == dated(dict.fromkeys([*days, "65+"], 1))
            == dict.fromkeys(days, 1)
        )
    others = (["1-Mar", "2-Sep"], ["Mar", "may 5", "1-March"], ["Jan-20", "Feb-20", "unknown"])
    assert [dated(dict.fromkeys(labels, 1)) for labels in others] == [{}] * 3


def test_labels_that_are_several_of_the_others_or_their_numbers_are_told(make: Make, store: FolderStore) -> None:
    several = ["spam", "ham", "spam|ham", "ham;spam", "spam, ham", "spam|eggs", "a,b"] * 5
    made = make({"a.jsonl": lines(label=several)}, **CLASSES)
    told = "labels: several in one, and a class of its own? ham;spam (5 rows), spam, ham (5 rows), spam|ham (5 rows)"
    assert told in json.loads(store.get(made.files["card_json"]))["warnings"]
    for labels, found in (
        (["0", "1", "neg", "pos"], True),
        (["0", "1", "2", "neg", "pos"], False),
        (["0", "1", "2", "3"], False),
        (["0", "1", "2.5", "3-4"], False),
        (["0", "no"], False),
        (["1", "2", "neg", "pos"], False),
    ):
        rows = dict.fromkeys(labels, 1)
        assert numbers_and_names(rows) == (rows if found else {})


def test_groups_and_sources_that_may_be_one_are_told(make: Make, store: FolderStore) -> None:
    labels = ['["a"]', "['a']", "a"] * 10
    values = ["s", "s\u200b", "7", "7.00", "07", "t"]
    made = make({"a.jsonl": lines(group=values * 5, source=values * 5, label=labels)})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "one value" in line]
    alike = ["07 (5 rows), 7 (5 rows), 7.00 (5 rows)", r"s (5 rows), 's\u200b' (5 rows)"]
    many = {"group": [f"{way}{n}" for n in range(9) for way in "uU"]}
    card = json.loads(store.get(make({"a.jsonl": lines(**many)}, "d2").files["card_json"]))
    assert "groups: one value, or several? 4 more such groups" in card["warnings"]
    assert told == [
        "labels: one value, or several? [\"a\"] (10 rows), ['a'] (10 rows), a (10 rows)",
        *(f"{name}: one value, or several? {group}" for name in ("sources", "groups") for group in alike),
    ]


def test_rows_that_say_their_own_label_are_told_to_a_classifier(make: Make, store: FolderStore) -> None:
    labels = ["spam", "Ham"] * 10
    chats = [
        [{"role": "user", "content": f"Is {n} spam or ham?"}, {"role": "assistant", "content": f"**{label.lower()}**."}]
        for n, label in enumerate(labels)
    ]
    files = {
        "answers.jsonl": "\n".join(
            map(json.dumps, ({"messages": c, "label": y} for c, y in zip(chats, labels, strict=True)))
        ).encode(),
        "texts.jsonl": lines(text=[f"Mail {n} => {label}" for n, label in enumerate(labels)], label=labels),
        "clean.jsonl": lines(text=[f"Mail {n} is no {('x', '')[n % 3 > 0]}spam" for n in range(20)], label=labels),
    }
    told = " rows begin or end with their own label"
    for values, found in ((CLASSES, ["answers.jsonl: 20", "texts.jsonl: 20"]), ({}, [])):
        warnings = json.loads(store.get(make(files, f"d{len(found)}", **values).files["card_json"]))["warnings"]
        assert [line.partition(told)[0] for line in warnings if told in line] == found


def test_groups_and_sources_that_stand_for_none_are_told_and_blank_ones_are_none(
    make: Make, rows: Rows, store: FolderStore
) -> None:
    values = ["null", "None", " ", "u1", "u2"] * 6
    made = make({"a.jsonl": lines(group=values, source=values, label=values)})
    told = "programs write so what is missing"
    once = "and the rows of each are on one side of the split: None (6 rows), null (6 rows)"
    assert [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if told in line] == [
        f"labels: {told}: None (6 rows), null (6 rows)",
        f"sources: {told}: None (6 rows), null (6 rows)",
        f"groups: {told}, {once}",
    ]
    assert {row[name] for row in rows(made) for name in ("group", "label")} == {None, "None", "null", "u1", "u2"}
    assert make({"a.jsonl": lines(label=values)}, "d2", **CLASSES).counts["no_label"] == 6


def test_missing_values_that_are_learned_are_told(make: Make, store: FolderStore) -> None:
    """Also behind another text, and beside a content; what a tool gives is whatever it gives."""
    answers = [
        "NA",
        " nan",
        "#BEZUG!",
        "#" * 255,
        "[deleted]",
        "<p><br></p>",
        "This message was deleted",
        "[object Object]",
        "Nanking",
        "It is on.\n\nNanking",
    ]
    rows: list[dict[str, Any]] = [{"prompt": "p", "completion": answer} for answer in answers]
    rows.append({"prompt": "p", "completion": "It is on, as it was on the day before.", "system": "None"})
    rows.append(
        {"instruction": "Is the light on today?", "input": "<noinput>", "output": "It is on, as it was before."}
    )
    rows.append({"instruction": "Is it off?", "input": "Not applicable.", "output": "Not applicable"})
    said = {"role": "assistant", "content": "It is on, as it was on the day before."}
    asked = {"role": "user", "content": "Is the light on today, or is it not?"}
    rows.append({"messages": [asked, {**said, "name": "nil", "reasoning_content": "null"}]})
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"name": "#N/A"}}}]}
    rows.append({"messages": [asked, call, {"role": "tool", "content": "(null)"}, said]})
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode(), "b.jsonl": lines(text=["null", "some text"])})
    [told] = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "missing" in line]
    once = ["#" * LONGEST_UNSET, "#BEZUG!", "<noinput>", "<p><br></p>", "NA", "None", "Not applicable."]
    once += ["This message was deleted", "[deleted]", "[object Object]", "nan", "nil"]
    spelled = ", ".join([*(f"`{text}` (1 row)" for text in once), "`null` (2 rows)"])
    assert told == f"Learned, though programs write so what is missing: {spelled}; leave out rows or fields where it is"


def test_what_python_shows_of_a_value_is_told(make: Make, store: FolderStore) -> None:
    texts = ["['a', \"b\"]", "{'a': array([1])}", "array(['a'])", "b'Yes.'", 'b"It\'s on."', "('Yes.',)", "('a', 'b')",
             "Row(answer='Yes.')"]  # fmt: skip
    others = ["[1, 2]", '{"a": 1}', '["a"]', "('Yes.')", "(1, 2)", "b or 'c'", "f(x='y')", '"Yes," she said, "it is."',
              "['a'] is a list"]  # fmt: skip
    rows = [{"prompt": f"p {n}", "completion": text} for n, text in enumerate([*texts, *others])]
    table = b"question,answer,label\nb'Is it on?',Yes.,b'spam'\nIs it?,No.,ham\n"
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode(), "b.csv": table})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "Python" in line]
    what = "rows hold a list, object, tuple or bytes as Python shows it; if that is not meant, write the text alone"
    labels = "labels: as Python shows a list, object, tuple or bytes, or JSON a text: b'spam' (1 row)"
    assert told == [labels, f"a.jsonl: 8 {what}", f"b.csv: 1 {what}"]


def test_a_text_that_json_wrote_is_told_where_most_of_a_file_are_or_it_has_escapes(
    make: Make, store: FolderStore
) -> None:
    said = [f"It is on, as row {n} says." for n in range(40)]
    tables = {
        "all.jsonl": [f'"{text}"' for text in said],  # DuckDB's `->`
        "few.jsonl": [*said[:-1], json.dumps("One.\nTwo.")],
        "novel.jsonl": [f'"{text}"' if n % 3 else text for n, text in enumerate(said[:20])] + said[20:],
        "plain.jsonl": ['"Yes," she said, "it is."', '"One.\nTwo."', 'It is "on"', *said],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "as JSON writes it" in line]
    assert [line.partition(" hold ")[0] for line in told] == ["all.jsonl: 40 rows", "few.jsonl: 1 rows"]


def test_texts_that_are_encoded_are_told_where_most_of_a_file_are(make: Make, store: FolderStore) -> None:
    said = [f"Größe {n} of the lamp, and so on. " * (n + 1) for n in range(24)]
    ways: list[Callable[[str], str]] = [
        lambda text: b64encode(text.encode()).decode(),  # BigQuery and Spark
        lambda text: f"\\x{text.encode().hex()}",  # PostgreSQL
        lambda text: f"0x{text.encode().hex().upper()}",  # SQL Server
        quote,
    ]
    tables = {
        "all.jsonl": [ways[n % 4](text) for n, text in enumerate(said)],
        "few.jsonl": [ways[n % 4](text) if n % 3 else text for n, text in enumerate(said)][:13] + said[:12],
        "keys.jsonl": [sha256(text.encode()).hexdigest() for text in said],
        "words.jsonl": ["Donaudampfschifffahrtsgesellschaft", "internationalization", "0xDEADBEEF", *said[:1]],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "base64" in line]
    assert [line.partition(" hold ")[0] for line in told] == ["all.jsonl: 24 rows"]


def test_texts_that_are_where_a_file_is_are_told_where_most_of_a_file_are(make: Make, store: FolderStore) -> None:
    places = ("gs://b/docs/{}.pdf", "docs/{}.txt", "s3://b/a b/{}", "C:\\my_data\\of_lamps\\{}.md", "file:///data/{}")
    tables = {
        "all.jsonl": [place.format(n) for n in range(8) for place in places],
        "few.jsonl": [f"It is on, says docs/{n}.txt" if n % 3 else f"docs/{n}.txt" for n in range(40)],
        "links.jsonl": [f"https://x.org/{n}" for n in range(40)],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    told = "all.jsonl: 32 rows hold where a file is and not what is in it; if that is not meant, write its text"
    assert told in (warnings := json.loads(store.get(made.files["card_json"]))["warnings"])
    assert sum("where a file is" in line for line in warnings) == 1


def test_line_ends_in_letters_are_told_where_hardly_a_row_has_one(make: Make, store: FolderStore) -> None:
    tables = {
        "twice.jsonl": [f"Row {n} is on.\\n\\nIs it?" if n % 4 else f"Row {n} is on." for n in range(40)],
        "small.jsonl": [f"roses are red {n},\\nviolets are blue,\\nsugar is sweet" for n in range(40)],
        "codes.jsonl": [f"Die Gr\\u00f6\\u00dfe {n} ist sch\\u00f6n" for n in range(40)],
        "paths.jsonl": [rf"Copy C:\new\notes\{n} and D:\u00e4\x" for n in range(40)],
        "code.jsonl": [f"print('Row {n}\\n')" if n % 4 else f"a = {n}\nprint(a)" for n in range(40)],
        "formulas.jsonl": [rf"What is $\nu_{n} \neq \nabla$ in \times?" for n in range(40)],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    told = "twice.jsonl: 30 rows have `\\n` in letters, and few have a line end; if that is not meant, write JSON"
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert [line[: len(told)] for line in warnings if "in letters" in line] == [
        told.replace("twice", "small").replace("30", "40"),
        told,
    ]
    assert [line.split(" rows ")[0] for line in warnings if "write them in ASCII" in line] == ["codes.jsonl: 40"]


def test_colours_and_backspaces_of_terminals_are_told(make: Make, store: FolderStore) -> None:
    tables = {
        "log.jsonl": [f"\x1b[31mNumber {n}\x1b[0m is on." if n % 8 else f"b\x08bNumber {n}" for n in range(40)],
        "clean.jsonl": [rf"Write \x1b[31m or \b, and number {n} is red." for n in range(40)],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert [line.split(" hold ")[0] for line in warnings if "a terminal reads" in line] == ["log.jsonl: 40 rows"]


def test_characters_as_html_and_excel_write_them_are_told_where_some_of_a_file_have_them(
    make: Make, store: FolderStore
) -> None:
    tables = {
        "html.jsonl": [
            f"It&#39;s number {n}, &quot;on&quot;" if n % 4 else f"Number {n} &more; is on" for n in range(40)
        ],
        "excel.jsonl": [f"Number {n} is on._x000D_\nAnd off." for n in range(40)],
        "page.jsonl": [f"<p>Number {n} is on &amp; off.</p>" for n in range(40)],
        "few.jsonl": [f"Number {n} is on{' &amp; off' * (n == 0)}. R&D, a & b; _x000D_" for n in range(40)],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    told = [line.partition(" rows have characters as HTML")[0] for line in warnings if "as HTML" in line]
    assert told == ["excel.jsonl: 40", "html.jsonl: 30"]


def test_pictures_within_texts_are_told_where_some_of_a_file_have_them(make: Make, store: FolderStore) -> None:
    picture = b64encode(bytes(range(90))).decode()
    tables = {
        "pages.jsonl": [f"Number {n} ![is](data:image/png;base64,{picture}) on" for n in range(40)],
        "places.jsonl": [f"What is on it, {n}?\n<image>" for n in range(40)],
        "few.jsonl": [f"A page {n}: `data:image/png;base64,iVBORw0KGgo...` and {'words ' * 20}" for n in range(40)],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    told = "40 rows hold a picture, sound or video by its bytes"
    assert [line.partition(" (")[0] for line in warnings if "picture" in line] == [
        f"pages.jsonl: {told}",
        f"places.jsonl: {told}",
    ]


def test_texts_that_end_where_programs_cut_them_are_told(make: Make, store: FolderStore) -> None:
    def told(lengths: list[int]) -> list[str]:
        texts = [(f"Number {n} of them goes on and on. " * 2000)[:length] for n, length in enumerate(lengths)]
        made = make({"a.jsonl": lines(text=texts)}, name=f"d{len(lengths)}")
        warnings: list[str] = json.loads(store.get(made.files["card_json"]))["warnings"]
        return [line for line in warnings if "cut longer ones off" in line]

    (line,) = told([255] * 4 + [*range(200, 240)])
    assert line.startswith("a.jsonl: 4 rows hold a text of 255 characters")
    assert told([255, *range(200, 240)]) == []


def test_what_exports_and_sheets_write_for_formulas_is_told(make: Make, store: FolderStore) -> None:
    def told(name: str, texts: list[str]) -> list[str]:
        made = make({"a.jsonl": lines(text=[*texts, *(f"row {n} of them" for n in range(30))])}, name)
        warnings: list[str] = json.loads(store.get(made.files["card_json"]))["warnings"]
        return [line for line in warnings if "formula" in line]

    (line,) = told("d1", ["'- Hold the key", "'=1+1 is two", "'+49 is ours"])
    assert line.startswith("a.jsonl: 3 rows hold a text that begins with an apostrophe before")
    (line,) = told("d2", ['=VLOOKUP(A2,"B:B",1)', '=IF(A2>1,"x","y")'])
    assert line.startswith("a.jsonl: 2 rows hold a formula")
    assert told("d3", ["'tis a quote", "= is a sign", "'-' is one too"] + ["x"] * 40) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a" * 32_767, True),
        ("a" * 50_000, True),
        ("a" * 65_535, True),
        ("a" * 32_766, False),
        ("\N{GRINNING FACE}" + "a" * 32_765, True),  # two to Excel
        ("\N{GRINNING FACE}" + "a" * 32_764, True),  # and the next one did not fit
        ("\N{GRINNING FACE}" + "a" * 32_763, False),
        ("\N{GRINNING FACE}" * 16_383, True),
        ("\u00e4" * 32_766, False),
        ("\u00e4" * 32_767, True),  # 65,534 bytes, too
        ("\u20ac" * 21_845, True),  # 65,535 bytes
    ],
)
def test_one_text_that_fills_a_cell_is_told(make: Make, store: FolderStore, text: str, told: bool) -> None:
    """In an export most answers are short, and the few that were cut are most of what is learned."""
    made = make({"a.jsonl": lines(text=[f"Number {n} of them" for n in range(200)] + [text])})
    warnings: list[str] = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert [line.partition(" (")[0] for line in warnings if "cut longer ones off" in line] == (
        ["a.jsonl: 1 rows hold a text as long as a cell of Excel"] if told else []
    )


def test_a_column_that_fills_a_cell_is_told_where_it_is_a_part_of_a_text(make: Make, store: FolderStore) -> None:
    rows = [{"instruction": f"Sum up {n}", "input": "a" * 32_767, "output": f"sum {n}"} for n in range(3)]
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    warnings: list[str] = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert any(line.startswith("a.jsonl: 3 rows hold a text as long as a cell of Excel") for line in warnings)


def test_texts_that_were_misread_or_lost_characters_are_told(make: Make, store: FolderStore) -> None:
    said = [f"Für {n} Übungen à {n} €, «é» und Größe {n}" for n in range(30)]
    bad = {"misread": said[0].encode().decode("cp1252"), "replaced": "Gr\ufffd\ufffde", "of both": "Ã\u0084nderung"}
    made = make({f"{name}.jsonl": lines(text=[*said, text]) for name, text in bad.items()})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if ".jsonl" in line]
    assert [line.partition(", which ")[0].partition(" than ")[0] for line in told] == [
        "replaced.jsonl: 1 rows hold U+FFFD",
        "misread.jsonl: 1 rows were read in another encoding",
        "of both.jsonl: 1 rows were read in another encoding",
    ]
    mended = make({"a.jsonl": lines(text=[*said, *bad.values()])}, "d2", unicode="repair")
    assert not any("another encoding" in line for line in json.loads(store.get(mended.files["card_json"]))["warnings"])


@pytest.mark.parametrize(("labels", "told"), [(range(30), True), ([*range(15)] * 2, False), (["a", "b"] * 15, False)])
def test_labels_that_nearly_no_row_shares_are_told(
    make: Make, store: FolderStore, labels: list[Any], told: bool
) -> None:
    made = make({"a.jsonl": lines(label=labels)}, **CLASSES)
    line = "labels: 30 classes of 30 rows, fewer than 2 of each; are they scores, ids or answers?"
    assert (line in json.loads(store.get(made.files["card_json"]))["warnings"]) == told


def test_groups_that_programs_have_rounded_are_told(make: Make, store: FolderStore) -> None:
    groups = ["1.23457E+17", "4,04E+15", "5E+15", "AE+15", "E+15", "15"] * 5
    ids = [1.2345678901234568e17, 2**60, float(2**53), "1.2345678901234568e+17", "x" * 30] * 4
    numbers = pa.array([None, *[1e17 + 64 * n for n in range(9)]], pa.float64())
    made = make(
        {
            "a.jsonl": lines(group=groups, source=["sheet"] * 30),
            "b.jsonl": lines(group_id=ids),
            "c.parquet": parquet(3, group=numbers),
        }
    )
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "Excel" in line]
    assert [line.partition(", as ")[0] for line in told] == [
        f"{file} rows have a group, label or source that a program has rounded"
        for file in ("a.jsonl: 15", "b.jsonl: 8", "c.parquet: 9")
    ]


@pytest.mark.parametrize(
    ("labels", "told"),
    [([True, False, False], "false"), ([1, 0, 0], "0"), ([0], "0"), ([0, 1, 2], None), ([True, 1, 1], None)],
)
def test_answers_that_are_marked_as_wrong_are_told(
    make: Make, store: FolderStore, labels: list[object], told: str | None
) -> None:
    """As TRL's KTO has them."""
    rows = [{"prompt": f"p {n}", "completion": "c", "label": label} for n, label in enumerate(labels * 20)]
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    found = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "marked" in line]
    count = sum(not label for label in labels) * 20
    assert found == (
        []
        if told is None
        else [f"labels: {count} rows have `{told}`; an answer that is marked as wrong so is learned all the same"]
    )


def test_conversations_that_stand_in_a_text_are_told(make: Make, store: FolderStore) -> None:
    """A column of messages that was written as text, under a name that is no conversation's."""
    chats = [[{"role": "user", "content": f"Is {n} on?"}, {"role": "assistant", "content": "Yes."}] for n in range(20)]
    texts: list[dict[str, Any]] = [{"text": json.dumps(chat)} for chat in chats]
    texts += [{"text": json.dumps({"messages": chat})} for chat in chats]
    texts += [{"text": str(chat)} for chat in chats]
    texts += [{"prompt": f" {json.dumps(chat)}", "completion": "It is on."} for chat in chats]
    texts += [{"prompt": f"p {n}", "completion": json.dumps(chat[1])} for n, chat in enumerate(chats)]
    texts += [
        {"prompt": f"p {n}", "completion": json.dumps({"choices": [{"message": chat[1]}]})}
        for n, chat in enumerate(chats)
    ]
    parts = [json.dumps([{"type": "text", "text": f"Is {n} on?"}]) for n in range(20)]
    texts += [{"messages": [{"role": "user", "content": part}, chats[0][1]]} for part in parts]
    texts += [{"text": json.dumps(["user", n])} for n in range(20)]
    texts += [{"text": json.dumps({"type": "text", "name": f"field {n}"})} for n in range(20)]
    made = make({"a.jsonl": "\n".join(map(json.dumps, texts)).encode()})
    told = [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "a conversation" in line]
    assert len(told) == 1
    assert told[0].startswith("a.jsonl: 140 rows hold a conversation, a message or its parts as JSON text")


def test_labels_of_texts_mark_no_answer(make: Make, store: FolderStore) -> None:
    texts = make({"a.jsonl": lines(label=[True, False] * 20)}, "texts")
    assert not any("marked" in line for line in json.loads(store.get(texts.files["card_json"]))["warnings"])


def test_hive_s_null_in_csv_is_no_value(make: Make, rows: Rows) -> None:
    table = "instruction\tinput\toutput\tlabel\n" + "".join(f"do {n}\t\\N\tdone\t\\N\n" for n in range(30))
    found = rows(make({"a.tsv": table.encode()}))
    assert {row["messages"][0]["content"] for row in found} == {f"do {n}" for n in range(30)}
    assert {row["label"] for row in found} == {None}


def test_drops_of_a_family_agree_on_the_spelling(make: Make, recipe: Callable[..., Recipe]) -> None:
    first = make({"a.jsonl": lines(label=[True, False] * 20)}, "d1", scope="family", **CLASSES)
    assert all(check.ok for check in checks(first, recipe(**CLASSES)))
    later = json.dumps({"text": "another", "label": 1}).encode()
    second = make({"b.jsonl": later + b"\n" + lines(label=[1, 0] * 20)}, "d2", scope="family", **CLASSES)
    broken = [check.name for check in checks(second, recipe(**CLASSES)) if not check.ok]
    assert "labels have one spelling" in broken


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["Spam", "Ham"], ["one value, or several? Ham (10 rows), ham (20 rows)"]),
        ([0, 1], ["are the numbers these names' own? 0 (10 rows), 1 (10 rows), ham (20 rows), spam (20 rows)"]),
        (["spam", "new"], []),
    ],
    ids=["case", "numbers", "same"],
)
def test_labels_of_a_family_s_drops_are_compared(
    make: Make, store: FolderStore, labels: list[Any], told: list[str]
) -> None:
    make({"a.jsonl": lines(label=["spam", "ham"] * 20)}, "d1", scope="family", **CLASSES)
    other = [{"text": f"another text of {n}", "label": labels[n % 2]} for n in range(20)]
    data = b"\n".join(json.dumps(row).encode() for row in other)
    card = json.loads(store.get(make({"b.jsonl": data}, "d2", scope="family", **CLASSES).files["card_json"]))
    assert [line.removeprefix("labels: ") for line in card["warnings"] if "?" in line][:1] == told
    # And the next drop knows the labels of both.
    data = data.replace(b"another", b"a third").replace(b'"Spam"', b'"spam"')
    card = json.loads(store.get(make({"c.jsonl": data}, "d3", scope="family", **CLASSES).files["card_json"]))
    assert bool(told) == any(line.startswith("labels: ") and "?" in line for line in card["warnings"])


def test_a_forgotten_group_stays_so_however_it_was_spelled() -> None:
    for forgotten in ("7", "7.0"):  # an older version may have either
        rule = Forgotten([document(forgotten).hex()], None, Columns())
        assert rule.group("7")
        assert rule.fields({"group": 7.0})
        assert rule.fields({"group": "7.0", "text": None})
        assert not rule.group("07")
        assert not rule.fields({"group": "7.5"})
