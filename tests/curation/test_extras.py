"""Columns that mean nothing to curation: kept as JSON where the recipe asks, and counted whatever it asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import curation
from curation.batch import Batch
from curation.canonical import Row
from curation.extras import Extras
from curation.reasons import Reason, RejectError
from curation.schema import Seen, by_format, changes, joined, known, retyped
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.recipe_data import Data
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode() + b"\n"


def table(columns: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


ROWS = [{"text": f"row {n} of many", "id": n, "meta": {"b": "é", "a": [1.5, None]}, "note": None} for n in range(40)]


def test_kept_columns_stay_with_their_rows_in_any_format(make: Make, rows: Rows, store: FolderStore) -> None:
    kept = make({"a.jsonl": lines(ROWS)}, "d1", data={"keep_columns": ["meta", "ID", "note", "gone"]})
    expected = {f"row {n} of many": f'{{"ID":{n},"meta":{{"a":[1.5,null],"b":"é"}}}}' for n in range(40)}
    assert {row["text"]: row["extras"] for row in rows(kept)} == expected
    # The order of the recipe's names and the format are no part of what the rows are.
    columns = {name: [row[name] for row in ROWS] for name in ("note", "meta", "text")} | {"id": list(range(40))}
    names = ["note", "gone", "ID", "meta"]
    other = make({"a.parquet": table(columns)}, "d2", data={"keep_columns": names})
    assert (other.digest, other.shards) == (kept.digest, kept.shards)
    whole = make({"a.jsonl": lines(ROWS)}, "d3", data={"keep_columns": "all"})
    assert {row["extras"] for row in rows(whole)} == {text.replace('"ID"', '"id"') for text in expected.values()}
    assert whole.rules["keep_columns"] == "all"


def test_without_it_versions_and_shards_are_what_they_were(make: Make, rows: Rows) -> None:
    plain = make({"a.jsonl": lines(ROWS)}, "d1")
    bare = make({"a.jsonl": lines([{"text": row["text"]} for row in ROWS])}, "d2")
    assert (bare.digest, bare.shards) == (plain.digest, plain.shards)
    assert set(rows(plain)[0]) == {"key", "messages", "chat", "text", "label", "source", "group", "split"}
    assert "keep_columns" not in plain.rules
    # Of the eleventh version of the kernel; what is not asked for does not change it.
    assert plain.digest == "d3f37eab527ffe438d9bf2ea224246c0c8c9ebde0d0f0e6fb251abe67322f7f0"


def test_a_changed_extra_is_new_data_and_no_new_key(
    store: FolderStore, upload: Callable[..., Drop], recipe: Callable[..., Recipe], make: Make, rows: Rows
) -> None:
    data = {"keep_columns": ["id"]}
    one = make({"a.jsonl": lines(ROWS)}, "d1", data=data)
    two = make({"a.jsonl": lines([{**row, "id": row["id"] + (row["id"] == 7)} for row in ROWS])}, "d2", data=data)
    assert one.digest != two.digest
    assert [(row["key"], row["split"]) for row in rows(one)] == [(row["key"], row["split"]) for row in rows(two)]
    # Which of two copies stays hangs on what they hold, never on which file comes first.
    twins = [{**row, "id": -row["id"] - 1} for row in ROWS]
    there = make({"a.jsonl": lines(ROWS), "b.jsonl": lines(twins)}, "d3", data=data)
    back = make({"a.jsonl": lines(twins), "b.jsonl": lines(ROWS)}, "d4", data=data)
    assert there.counts["duplicate"] == 40
    assert (there.digest, there.shards) == (back.digest, back.shards)
    assert {json.loads(row["extras"])["id"] < 0 for row in rows(there)} == {True, False}


def test_personal_data_in_kept_columns_are_masked(make: Make, rows: Rows) -> None:
    asked = [{"text": f"row {n}", "by": {"mail": f"jo{n}@example.com", "n": n}, "to@example.com": 1} for n in range(30)]
    manifest = make({"a.jsonl": lines(asked)}, data={"keep_columns": "all"}, pii={})
    found = sorted((json.loads(row["extras"]) for row in rows(manifest)), key=lambda extras: extras["by"]["n"])
    assert found == [{"by": {"mail": "<EMAIL>", "n": n}, "<EMAIL>": 1} for n in range(30)]
    assert "example.com" not in manifest.to_json().decode()


def test_columns_whose_names_have_one_mask_all_stay(make: Make, rows: Rows) -> None:
    asked = [{"text": f"row {n}", "a@example.com": n, "b@example.com": {"c@example.com": 1}} for n in range(30)]
    manifest = make({"a.jsonl": lines(asked)}, data={"keep_columns": "all"}, pii={})
    found = {row["text"]: row["extras"] for row in rows(manifest)}
    assert found == {f"row {n}": f'{{"<EMAIL>":{n},"<EMAIL> 2":{{"<EMAIL>":1}}}}' for n in range(30)}


def test_bytes_hide_no_personal_data_from_the_masks(make: Make, rows: Rows) -> None:
    texts = [f"row {n}" for n in range(30)]
    columns = {"text": texts, "raw": [b"jo@example.com"] * 30, "list": pa.array([[b"jo@example.com"]] * 30)}
    found = rows(make({"a.parquet": table(columns)}, "d1", data={"keep_columns": "all"}, pii={}))
    assert {row["extras"] for row in found} == {'{"list":["<EMAIL>"],"raw":"<EMAIL>"}'}
    columns["raw"] = [b"\x89PNG", "jo@example.com".encode("utf-16-le"), *[None] * 28]
    kept = make({"a.parquet": table(columns)}, "d2", data={"keep_columns": "all"}, pii={})
    assert curation.quarantined(kept.counts) == {"bad_field": 2}
    assert len(rows(make({"a.parquet": table(columns)}, "d3", data={"keep_columns": ["list"]}, pii={}))) == 30
    assert len(rows(make({"a.parquet": table(columns)}, "d4", data={"keep_columns": "all"}))) == 30


def test_names_from_outside_are_counted_and_shown_up_to_a_bound(make: Make, store: FolderStore) -> None:
    seen = Seen({})
    for n in range(30):
        seen.add({"x" * 10**6 + str(n): n})
    assert max(len(name) for name, _ in seen.counts) == 100
    assert seen.columns() == {"x" * 100: {"number": 30}}
    long = "s" * 10_000
    asked = [{"text": f"row {n}{' <|im_end|>' * (n < 12)}", "source": long, "label": long} for n in range(30)]
    card = store.get(make({"a.jsonl": lines(asked)}).files["card_json"]).decode()
    assert "s" * 200 in card
    assert "s" * 201 not in card
    batch = Batch()
    row = Row((), (), "text", "l" * 1000, "s" * 1000, "g" * 1000, 0, False, "{}")
    rules = SimpleNamespace(near=None)
    batch.add(SimpleNamespace(file=0, name="a", rules=rules), 0, row, b"", b"", b"", 1, 0, 0, None)  # type: ignore[arg-type]
    assert batch.weight >= 4 * 3000  # bytes that it may take


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"x": float("nan"), "y": [float("inf"), 1.0]}, '{"x":null,"y":[null,1.0]}'),
        ({"x": b"\x00\xff", "y": Decimal("1.10")}, '{"x":"AP8=","y":"1.10"}'),
        ({"x": datetime(2026, 1, 2, 3, 4, 5, 6, UTC)}, '{"x":"2026-01-02T03:04:05.000006+00:00"}'),
        ({"x": timedelta(days=1, microseconds=1)}, '{"x":"1 day, 0:00:00.000001"}'),
        ({"x": "\0\u2028"}, '{"x":"\\u0000\u2028"}'),
        ({"x": None, "text": "not of these"}, None),
        ({}, None),
    ],
)
def test_values_of_any_kind_become_json(fields: dict[str, Any], text: str | None) -> None:
    assert Extras("all", frozenset({"text"})).of(fields) == text


def test_what_cannot_be_written_ends_the_row_with_its_reason(make: Make) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, reason in (("\ud800", Reason.LONE_SURROGATE), (deep, Reason.TOO_DEEP)):
        with pytest.raises(RejectError) as caught:
            Extras(("x",), frozenset()).of({"x": value})
        assert caught.value.reason == reason
    manifest = make({"a.jsonl": lines([*ROWS, {"text": "one more", "id": "\ud800"}])}, data={"keep_columns": ["id"]})
    assert curation.quarantined(manifest.counts) == {"lone_surrogate": 1}


def test_times_of_a_table_hang_on_no_other_library(make: Make, rows: Rows) -> None:
    nanos = pa.array([n * 1_001 for n in range(30)])
    columns = {
        "text": [f"row {n}" for n in range(30)],
        "at": nanos.cast(pa.timestamp("ns")),
        "zone": nanos.cast(pa.timestamp("ns", "No/Such_Zone")),
        "list": pa.array([[n * 1_001] for n in range(30)]).cast(pa.list_(pa.duration("ns"))),
    }
    found = rows(make({"a.parquet": table(columns)}, data={"keep_columns": "all"}))
    assert {row["text"]: json.loads(row["extras"]) for row in found}["row 2"] == {
        "at": "1970-01-01T00:00:00.000002",
        "zone": "1970-01-01T00:00:00.000002+00:00",
        "list": ["0:00:00.000002"],
    }


@pytest.mark.parametrize("asked", [[], "id", [""], {"id": 1}, ["x" * 201]])
def test_what_the_recipe_may_not_say(asked: Any) -> None:
    with pytest.raises(ValidationError, match="keep_columns"):
        Data.model_validate({"keep_columns": asked})


# --- drift ---


def test_drift_is_told_and_no_row_goes(make: Make, store: FolderStore, tmp_path: Path) -> None:
    numbers = [{"text": f"row {n}", "score": n} for n in range(30)]
    words = [{"text": f"line {n}", "score": "two", "lang": "en"} for n in range(5)]
    manifest = make(
        {
            "a.jsonl": lines(numbers),
            "b.jsonl": lines([*words, {"text": "none", "score": None}]),
            "c.csv": b"text,score\nof a table,7\n",
            "d.parquet": table({"text": ["of another"], "score": [1.5], "unread": [{"x": 1}]}),
        }
    )
    assert manifest.counts["train"] + manifest.counts["eval"] == manifest.counts["input"] == 38
    assert manifest.columns == {
        "CSV": {"score": {"string": 1}, "text": {"string": 1}},
        "JSON": {
            "lang": {"string": 5},
            "score": {"null": 1, "number": 30, "string": 5},
            "text": {"string": 36},
        },
        "Parquet": {"score": {"number": 1}, "text": {"string": 1}, "unread": {"object": 1}},
    }
    assert Manifest.from_json(manifest.to_json()).columns == manifest.columns
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["columns"]["changed"] == [
        "JSON column `lang` is only in b.jsonl",
        "JSON column `score` has several types: number in 30 rows (a.jsonl), string in 5 rows (b.jsonl)",
    ]
    assert card["columns"]["seen"] == manifest.columns
    page = store.get(manifest.files["card_html"]).decode()
    assert "string in 5 rows (b.jsonl)" in page
    assert "<td><code>unread</code></td><td>object in 1</td>" in page


def test_drift_since_the_version_before() -> None:
    before = {"JSON": {"text": {"string": 9}, "gone": {"string": 9}, "score": {"number": 9}, "empty": {"null": 9}}}
    now = {"text": {"string": 2, "null": 1}, "score": {"string": 2}, "new": {"object": 1}, "empty": {"number": 1}}
    assert changes([("a.jsonl", "jsonl", now), ("b.csv", "csv", {"x": {"string": 1}})], before) == [
        "JSON column `gone` is gone since the version before",
        "JSON column `new` is new since the version before",
        "JSON column `score` was number in the version before, and is string",
    ]
    assert changes([("a.jsonl", "jsonl", now)]) == []


def test_drift_is_told_against_the_family_s_version_before(make: Make, store: FolderStore) -> None:
    make({"a.jsonl": lines(ROWS)}, "d1")
    later = [{"text": f"later {n}", "id": str(n), "lang": "en"} for n in range(40)]
    manifest = make({"b.jsonl": lines(later)}, "d2")
    assert json.loads(store.get(manifest.files["card_json"]))["columns"]["changed"] == [
        "JSON column `id` was number in the version before, and is string",
        "JSON column `lang` is new since the version before",
        "JSON column `meta` is gone since the version before",
        "JSON column `note` is gone since the version before",
    ]
    # What an earlier Dropforge, or somebody else, left as a card tells nothing.
    for card in (None, {}, {"columns": 3}, {"columns": {"seen": {"JSON": {"a": 1}}}}):
        assert known(card) is None


def test_columns_whose_names_are_data_do_not_fill_the_manifest(make: Make, store: FolderStore) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"row {n}", **{f"user {n} {at}\ud800": at for at in range(9)}} for n in range(200)
    ]
    manifest = make({"a.jsonl": lines(rows)})
    assert manifest.counts["input"] == 200
    assert len(manifest.columns["JSON"]) == 500
    keys, warning = json.loads(store.get(manifest.files["card_json"]))["warnings"]
    assert "too many columns" in warning
    assert keys.count("(1 row)") == 100
    many = {f"c{n:04}": {"string": n + 1} for n in range(1000)}
    assert set(by_format([("a", "csv", many)])["CSV"]) == set(list(many)[500:])
    assert joined([{"b": {"x": 1}}, {"a": {"y": 2}, "b": {"x": 3}}]) == {"a": {"y": 2}, "b": {"x": 4}}


def test_a_column_that_changes_its_type_stops_the_run_where_the_recipe_asks(
    make: Make, recipe: Callable[..., Recipe]
) -> None:
    strict = recipe(gate={"type_changes": "refuse"})
    texts = [{"text": f"row {n} of many", "id": n, "note": None} for n in range(40)]
    one = make({"a.jsonl": lines(texts)}, "d1")
    assert all(item.ok for item in curation.check(one, strict))
    # Another type in another drop: no number any more. A missing value, or a new column, is no change.
    two = make(
        {"a.jsonl": lines([{"text": f"other {n} of many", "id": "7", "note": "x", "new": 1} for n in range(40)])}, "d2"
    )
    with pytest.raises(DataError, match=r"columns keep their types`: JSON column `id`, wanted: .* to report"):
        curation.check(two, strict)
    curation.check(two, recipe())
    curation.check(two, recipe(gate={"type_changes": "refuse", "override": "agreed with Ada"}))
    # Several in the files of one drop.
    more = [{"text": f"more {n}", "id": [n]} for n in range(5)]
    three = make({"a.jsonl": lines(texts), "b.jsonl": lines(more)}, "d3")
    assert three.measured["retyped"] == ["JSON column `id`"]
    old = Manifest(**{**three.__dict__, "measured": {}})
    with pytest.raises(DataError, match=r"does not record it.*`curation\.gate\.type_changes`"):
        curation.check(old, strict)
    assert retyped([(str(n), "jsonl", {f"c{n}": {"number": 1, "string": 1}}) for n in range(50)]) == [
        f"JSON column `c{n}`" for n in sorted(range(50), key=str)[:20]
    ]
