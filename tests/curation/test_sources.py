"""Data that a recipe names: the same dataset as of an upload, pinned, and nothing outside of what was named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import curation
from dropforge import layout
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.recipe_data import Source
from dropforge.sources import pin
from dropforge.store import FolderStore

Curate = Callable[[Drop], Manifest]


@pytest.fixture
def run(store: FolderStore, recipe: Callable[..., Recipe], tmp_path: Path) -> Curate:
    def run(drop: Drop) -> Manifest:
        return curation.curate(store, drop, recipe(), workdir=tmp_path / f"work-{drop.drop}")

    return run


def _parquet(lines: list[bytes]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines]), sink)
    return sink.getvalue()


def test_a_prefix_is_the_same_dataset_as_an_upload_whatever_its_files(
    store: FolderStore, upload: Callable[..., Drop], run: Curate, texts: Callable[..., list[bytes]]
) -> None:
    lines = texts(80)
    uploaded = upload({"a.jsonl": b"\n".join(lines)})
    store.put("lake/lines/a.jsonl", b"\n".join(lines))
    store.put("lake/lines/_SUCCESS", b"")
    store.put("lake/lines/recipe.yaml", b"extends: nothing")
    store.put("lake/lines-of-others/b.jsonl", b"\n".join(texts(5, 1000)))
    store.put("lake/tables/one/1.parquet", _parquet(lines[:30]))
    store.put("lake/tables/two/2.parquet", _parquet(lines[30:]))
    same = pin(store, Source(prefix="lake/lines"), "fam")
    assert (same.id, same.prefix) == (uploaded.id, "lake/lines/")
    digests = {run(drop).digest for drop in (uploaded, same, pin(store, Source(prefix="lake/tables/"), "fam"))}
    assert len(digests) == 1


def test_a_dataset_version_gives_its_rows_again(
    store: FolderStore,
    upload: Callable[..., Drop],
    run: Curate,
    texts: Callable[..., list[bytes]],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    made = run(upload({"a.jsonl": b"\n".join([*texts(80), *texts(20)])}))
    again = run(pin(store, Source(dataset=f"fam/{made.digest}"), "other"))
    assert (again.family, again.counts["input"]) == ("other", 80)

    def sides(manifest: Manifest) -> list[tuple[bytes, str]]:
        return sorted((row["key"], row["split"]) for row in rows(manifest))

    assert sides(again) == sides(made)


def test_a_changed_file_is_refused_under_its_pin(
    store: FolderStore, run: Curate, texts: Callable[..., list[bytes]]
) -> None:
    store.put("lake/a.jsonl", b"\n".join(texts(10)))
    drop = pin(store, Source(prefix="lake/"), "fam")
    store.put("lake/a.jsonl", b"\n".join(texts(11)))
    with pytest.raises(DataError, match="changed while it was being read"):
        run(drop)
    with pytest.raises(DataError, match=r"the recipe asks for.*data\.source\.id"):
        pin(store, Source(prefix="lake/", id=drop.id), "fam")
    store.put("lake/a.jsonl", b"\n".join(texts(10)))
    assert pin(store, Source(prefix="lake/", id=drop.id), "fam") == drop


def test_a_shard_that_was_changed_is_refused(
    store: FolderStore, upload: Callable[..., Drop], run: Curate, texts: Callable[..., list[bytes]]
) -> None:
    made = run(upload({"a.jsonl": b"\n".join(texts(40))}))
    source = Source(dataset=f"fam/{made.digest}")
    shard = made.shards[0]
    good = store.get(shard.key)
    store.put(shard.key, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DataError, match="the drop recorded"):
        run(pin(store, source, "fam"))
    store.put(shard.key, good + b"x")
    with pytest.raises(DataError, match="not what its manifest says"):
        pin(store, source, "fam")


def test_a_manifest_cannot_lead_elsewhere(store: FolderStore) -> None:
    shard = {"split": "train", "key": "ledger/secret", "sha256": "0" * 64, "rows": 1, "bytes": 1}
    values = {"family": "fam", "digest": "a" * 64, "counts": {}, "rules": {}, "shards": [shard]}
    values |= {"inputs": [], "files": {}, "schema": 1}
    store.put("ledger/secret", b"x")
    store.put(layout.manifest_key("fam", "a" * 64), json.dumps(values).encode())
    with pytest.raises(DataError, match="not what its manifest says"):
        pin(store, Source(dataset="fam/" + "a" * 64), "fam")


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"prefix": "a/", "dataset": "fam/" + "0" * 64},
        {"prefix": "/"},
        {"prefix": "../other/"},
        {"prefix": "lake/../ledger/"},
        {"prefix": "s3://bucket/lake"},
        {"prefix": "lake/\n"},
        {"prefix": "ledger/"},
        {"prefix": "drops/fam/d1/"},
        {"dataset": "fam/../../x"},
        {"prefix": "lake", "id": "0"},
    ],
)
def test_names_that_are_none(source: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Source(**source)


@pytest.mark.parametrize(
    ("source", "cause"), [({"prefix": "gone/"}, "no files"), ({"dataset": "fam/" + "0" * 64}, "no such version")]
)
def test_what_is_not_there(store: FolderStore, source: dict[str, str], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        pin(store, Source(**source), "fam")
