"""What a file's name says: names of unfinished files are no data, and names that lie are told."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import curation
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]


def stream() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ["a row of Arrow"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl.tmp", "deep/a.jsonl.TMP", "a.jsonl.gz.part", "a.jsonl.partial", "a.parquet.crdownload", "a.jsonl~",
        "a.jsonl._COPYING_", "a.csv.filepart", "a.tmp.gz", "a.arrow.incomplete", ".a/../b.tmp",
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_unfinished_files_are_no_data(
    make: Make,
    texts: Callable[..., list[bytes]],
    quarantine: Any,
    recipe: Callable[..., Recipe],
    name: str,
    whole: bool,
) -> None:
    name = name.removeprefix(".a/../")
    more = b"\n".join(texts(9, 500)) if whole else b""
    manifest = make({"a.jsonl": b"\n".join(texts(60)), name: gzip.compress(more) if ".gz" in name and whole else more})
    assert manifest.counts["train"] + manifest.counts["eval"] == 60
    (fault,) = quarantine(manifest)
    assert (fault["file"], fault["position"], fault["reason"]) == (name, 0, "partial_file")
    assert "its name ends with" in fault["detail"]
    # Nobody knows what the file was to hold.
    with pytest.raises(DataError, match=r"partial_file.*under its final name"):
        curation.check(manifest, recipe())


def test_names_that_only_look_so_are_data(make: Make, texts: Callable[..., list[bytes]]) -> None:
    names = ("part-0.jsonl", "template.jsonl", "a.tmp/b.jsonl", "counterpart", "temp")
    manifest = make({name: b"\n".join(texts(10, 10 * at)) for at, name in enumerate(names)})
    assert manifest.counts["train"] + manifest.counts["eval"] == manifest.counts["input"] == 50


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", gzip.compress(b'{"text": "x"}', mtime=0), "the name says not compressed, the bytes are gzip"),
        ("a.jsonl.gz", b'{"text": "x"}', "the name says gzip, the bytes are not compressed"),
        ("a.parquet", b'{"text": "x"}', "the name says Parquet, the bytes are JSON"),
        ("a.parquet", b"<!DOCTYPE html><p>404", "the name says Parquet, the bytes are a web page or XML"),
        ("a.csv", b"%PDF-1.7 and so on", "the name says CSV, the bytes are PDF"),
        ("a.jsonl", stream(), "the name says JSON, the bytes are Arrow"),
        ("a.txt", b'{"text": "x"}', "the name says text, the bytes are JSON"),
        ("a.arrow", b"text\nx\n", "the name says Arrow, the bytes are text"),
        ("a.json", b'{"text": "x"}\n{"text": "y"}', None),
        ("rows", b'{"text": "x"}', None),
        ("a.arrow", stream(), None),
    ],
)
def test_a_name_that_lies_is_told_on_the_card(
    make: Make, texts: Callable[..., list[bytes]], store: FolderStore, name: str, data: bytes, said: str | None
) -> None:
    manifest = make({"good.jsonl": b"\n".join(texts(60)), name: data}, max_quarantined=1)
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["warnings"] == ([] if said is None else [f"{name}: {said}"])
    if said is not None:
        assert said in store.get(manifest.files["card_html"]).decode()
