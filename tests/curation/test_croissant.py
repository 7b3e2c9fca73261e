"""Croissant metadata: what the specification asks for, no place of the bucket, and read by MLCommons' own loader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from curation import written
from curation.croissant import CONTEXT, license_url
from curation.shards import Size
from dropforge import layout
from dropforge.dataset import Manifest
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

#: What the specification calls required of a data set, less what Dropforge does not know.
REQUIRED = {"@context", "@type", "conformsTo", "name", "description", "datePublished", "license", "distribution"}


@pytest.fixture
def made(make: Callable[..., Manifest], texts: Callable[..., list[bytes]], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A version of several shards with rows of both shapes."""
    monkeypatch.setattr(written, "Size", lambda: Size(group_rows=8, group_chars=300, shard_chars=300))
    talks = [
        {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}], "group": "g"}
        for n in range(20)
    ]
    lines = [*texts(40), *(json.dumps(talk).encode() for talk in talks)]
    return make({"a b.jsonl": b"\n".join(lines)}, name="d-1.x", data={"license": "CC-BY-4.0"})


def read(store: FolderStore, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(manifest.files["croissant"]))
    return found


def test_it_says_what_the_specification_asks_for(made: Manifest, store: FolderStore) -> None:
    told = read(store, made)
    assert told.keys() >= REQUIRED
    assert told["@context"] == CONTEXT
    assert told["@type"] == "sc:Dataset"
    assert told["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    assert told["license"] == "https://spdx.org/licenses/CC-BY-4.0.html"
    assert told["version"] == f"1.0.0+{made.digest}"
    names = [item["@id"] for item in told["distribution"]] + [item["@id"] for item in told["recordSet"]]
    for records in told["recordSet"]:
        for field in records["field"]:
            parts = field.get("subField", [field])
            names += {field["@id"], *(part["@id"] for part in parts)}
            for part in parts:
                assert part["@type"] == "cr:Field"
                assert part["dataType"] == "sc:Text"
                assert part["source"]["fileObject"]["@id"] in {item["@id"] for item in told["distribution"]}
    assert len(names) == len(set(names))


def test_kept_columns_are_a_field(make: Callable[..., Manifest], store: FolderStore) -> None:
    lines = [json.dumps({"text": f"row {n}", "id": n}).encode() for n in range(30)]
    for asked in ({}, {"keep_columns": ["id"]}):
        told = read(store, make({"a.jsonl": b"\n".join(lines)}, f"d{len(asked)}", data=asked))
        for records in told["recordSet"]:
            assert ("extras" in {field["name"] for field in records["field"]}) == bool(asked)


def test_its_files_are_the_shards_beside_it(made: Manifest, store: FolderStore) -> None:
    told = read(store, made)
    folder = (store.root / made.files["croissant"]).parent
    assert folder == (store.root / made.files["card_html"]).parent
    assert len(told["distribution"]) == len(made.shards) > 2
    for item in told["distribution"]:
        data = (folder / item["contentUrl"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == item["sha256"]
        assert item["contentSize"] == f"{len(data)} B"


def test_it_tells_nothing_of_where_the_bucket_lies(made: Manifest, store: FolderStore, tmp_path: Path) -> None:
    text = store.get(made.files["croissant"]).decode()
    assert str(tmp_path) not in text
    assert "s3://" not in text
    assert not [item for item in read(store, made)["distribution"] if not item["contentUrl"].startswith("../shards/")]


def test_the_loader_of_mlcommons_reads_every_row(
    made: Manifest, store: FolderStore, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    loader = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed, so its loader was not tried")
    data = loader.Dataset(jsonld=store.root / made.files["croissant"])
    assert not data.metadata.ctx.issues.errors
    names = [records.id for records in data.metadata.record_sets]
    assert names[:2] == ["train-00000", "train-00001"]
    found = [
        {name.removeprefix(f"{records}/"): value for name, value in row.items()}
        for records in names
        for row in data.records(records)
    ]
    assert [shape(row) for row in found] == [
        (row["text"], [turn["content"] for turn in row["messages"] or ()], row["group"]) for row in rows(made)
    ]
    shard = store.root / made.shards[0].key
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(Exception, match="An error occurred") as caught:
        list(loader.Dataset(jsonld=store.root / made.files["croissant"]).records("train-00000"))
    assert "is not identical with the reference" in str(caught.value.__cause__)


def shape(row: dict[str, Any]) -> tuple[str | None, list[str], str | None]:
    text, group = (row[name] and row[name].decode() for name in ("text", "group"))
    said = [value for turn in row["messages"] for name, value in turn.items() if name.endswith("/content")]
    return text, [value.decode() for value in said if value is not None], group


def test_of_a_family_all_shards_are_told(make: Callable[..., Manifest], texts: Any, store: FolderStore) -> None:
    make({"a.jsonl": b"\n".join(texts(40))}, scope="family")
    both = make({"a.jsonl": b"\n".join(texts(40, 40))}, name="d2", scope="family")
    told = read(store, both)
    assert {item["sha256"] for item in told["distribution"]} == {shard.sha256 for shard in both.shards}
    assert len(told["distribution"]) == 4
    assert "2 drops, the last one d2," in told["description"]


# --- licences ---


def test_without_a_licence_none_is_told(make: Callable[..., Manifest], texts: Any, store: FolderStore) -> None:
    plain = make({"a.jsonl": b"\n".join(texts(40))})
    assert "license" not in read(store, plain)
    named = make({"a.jsonl": b"\n".join(texts(40))}, name="d2", data={"license": "MIT"})
    assert named.digest == plain.digest, "a licence changes no row"


def test_the_card_tells_the_licence(made: Manifest, store: FolderStore) -> None:
    assert json.loads(store.get(made.files["card_json"]))["license"] == "CC-BY-4.0"
    assert b"<th>licence</th><td><code>CC-BY-4.0</code>" in store.get(made.files["card_html"])


def test_an_address_stays_as_it_is() -> None:
    assert license_url("https://example.com/terms") == "https://example.com/terms"


@pytest.mark.parametrize("name", ["two words", "", "javascript:alert(1)", "https://key:secret@host/x", "a" * 99])
def test_what_is_no_licence_is_refused(recipe: Callable[..., Recipe], name: str) -> None:
    with pytest.raises(RecipeError, match="license"):
        recipe({"license": name})


def test_it_lies_in_the_versions_folder(made: Manifest) -> None:
    assert made.files["croissant"].startswith(layout.dataset_prefix("fam", made.digest) + "croissant-")
