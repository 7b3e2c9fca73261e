"""Limits for smoke runs: the same first rows whatever the format, the workers and the order of the upload."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import curation
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Curate = Callable[..., Manifest]


def _parquet(lines: list[bytes]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist([json.loads(line) for line in lines])
    pq.write_table(table, sink, row_group_size=7)
    return sink.getvalue()


def test_the_first_rows_are_the_same_in_any_layout(make: Curate, texts: Callable[..., list[bytes]]) -> None:
    lines = texts(90)
    head, tail = b"\n".join(lines[:40]), b"\n".join(lines[40:])
    limit = {"limit_rows": 50}
    one = make({"a.jsonl": b"\n".join(lines)}, "one", limit)
    assert one.counts["input"] == 50
    assert one.rules["limit_rows"] == 50
    assert "limit_bytes" not in one.rules
    others = [
        make({"b.jsonl": tail, "a.jsonl": head}, "two", limit),
        make({"a.jsonl.gz": gzip.compress(head), "b.parquet": _parquet(lines[40:])}, "three", limit),
        make({"a.jsonl": b"\n".join(lines)}, "four", limit, workers=2),
    ]
    assert {made.digest for made in others} == {one.digest}


def test_bytes_are_those_of_the_text(
    make: Curate, texts: Callable[..., list[bytes]], rows: Callable[..., list[dict[str, str]]]
) -> None:
    lines = [json.dumps({"text": f"Zahl {number:02} für ä", "label": "x" * 500}).encode() for number in range(60)]
    # 13 characters, of which two take two bytes.
    made = make({"a.jsonl": b"\n".join(lines)}, "one", {"limit_bytes": 30 * 15 + 14})
    assert made.counts["input"] == 30
    assert {row["text"] for row in rows(made)} == {f"Zahl {number:02} für ä" for number in range(30)}
    assert make({"a.parquet": _parquet(lines)}, "two", {"limit_bytes": 30 * 15 + 14}).digest == made.digest
    both = make({"a.jsonl": b"\n".join(lines)}, "three", {"limit_bytes": 30 * 15, "limit_rows": 25})
    assert both.counts["input"] == 25
    with pytest.raises(DataError, match=r"a\.jsonl.*its first row has more text than `data\.limit_bytes`"):
        make({"a.jsonl": b"\n".join(lines)}, "four", {"limit_bytes": 14})


def test_what_is_behind_the_limit_is_not_fetched(
    store: FolderStore,
    upload: Callable[..., Drop],
    recipe: Callable[..., Recipe],
    texts: Callable[..., list[bytes]],
    tmp_path: Path,
) -> None:
    drop = upload(
        {"a.jsonl": b"\n".join([*texts(29), b"{bad}"]), "b.jsonl": b"\n".join(texts(30, 30)), "c.jsonl": b"x"}
    )
    store.delete("drops/fam/d1/b.jsonl")
    made = curation.curate(store, drop, recipe({"limit_rows": 30}), workdir=tmp_path / "w1")
    assert (made.counts["input"], made.counts["bad_json"]) == (30, 1)
    assert [entry["key"] for entry in made.inputs] == ["a.jsonl"]
    card = json.loads(store.get(made.files["card_json"]))
    assert any("30 rows: 1 of 3 files were looked at" in warning for warning in card["warnings"])
    with pytest.raises(DataError, match=r"b\.jsonl"):
        curation.curate(store, drop, recipe({"limit_rows": 31}), workdir=tmp_path / "w2")
