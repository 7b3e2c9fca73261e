"""Folders of `save_to_disk` and tables, written by the real library: the same rows, by the names of their classes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, List

import curation
from curation.classes import class_names
from dropforge import layout, saved
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.recipe_data import Source
from dropforge.sources import pin
from dropforge.store import FolderStore, ObjectInfo

NAMES = ["billing", "delivery", "other"]


def _rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"row number {at} of the test", "label": NAMES[at % 3]} for at in range(count)]


def _data(rows: list[dict[str, str]]) -> Dataset:
    numbered = [{**row, "label": NAMES.index(row["label"]), "more": {"id": 1}} for row in rows]
    return Dataset.from_list(numbered).cast_column("label", ClassLabel(names=NAMES))


@pytest.fixture
def save(store: FolderStore, tmp_path: Path) -> Callable[..., None]:
    def save(data: Any, prefix: str, **how: Any) -> None:
        data.save_to_disk(tmp_path / prefix, **how)
        for path in (tmp_path / prefix).rglob("*"):
            if path.is_file():
                store.put(f"{prefix}/{path.relative_to(tmp_path / prefix).as_posix()}", path.read_bytes())

    return save


def test_saved_rows_are_those_of_an_upload(
    store: FolderStore,
    upload: Callable[..., Drop],
    recipe: Callable[..., Recipe],
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows = _rows(60)
    drops = [upload({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})]
    save(_data(rows), "lake/one", num_shards=3)
    store.put("lake/one/data-00007-of-00008.arrow", b"of an older data set")
    drops.append(pin(store, Source(prefix="lake/one"), "fam"))
    save(DatasetDict(train=_data(rows[:40]), test=_data(rows[40:])), "lake/two")
    drops.append(pin(store, Source(prefix="lake/two/"), "fam"))
    assert [file.key for file in drops[1].files] == [f"data-0000{at}-of-00003.arrow" for at in range(3)]
    settings = recipe(task="classification")
    made: list[Manifest] = [
        curation.curate(store, drop, settings, workdir=tmp_path / f"w-{drop.drop}") for drop in drops
    ]
    listed = Dataset.from_list([{**row, "label": [NAMES.index(row["label"])]} for row in rows])
    save(listed.cast_column("label", List(ClassLabel(names=NAMES))), "lake/three")
    drop = pin(store, Source(prefix="lake/three"), "fam")
    made.append(curation.curate(store, drop, settings, workdir=tmp_path / "w-lists"))
    assert made[0].counts["input"] == 60
    assert {manifest.digest for manifest in made} == {made[0].digest}
    save(_data(rows[:40]), "lake/three")
    key = "lake/three/data-00000-of-00001.arrow"
    store.put(key, store.get(key)[:-200])
    drop = pin(store, Source(prefix="lake/three"), "fam")
    with pytest.raises(DataError, match="bad_arrow"):
        curation.curate(store, drop, settings, workdir=tmp_path / "w-torn")


def test_a_table_of_class_labels_has_their_names(
    store: FolderStore, make: Callable[..., Manifest], rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    plain = make({"a.jsonl": "\n".join(map(json.dumps, _rows(60))).encode()}, task="classification")
    _data(_rows(60)).to_parquet(tmp_path / "a.parquet", batch_size=7)
    data = (tmp_path / "a.parquet").read_bytes()
    made = make({"b.parquet": data}, "d2", task="classification")
    assert (made.digest, made.shards) == (plain.digest, plain.shards)
    # A sound file with metadata of whatever kind: its numbers stay numbers. No class is no label.
    table = pq.read_table(tmp_path / "a.parquet")
    table = table.set_column(1, "label", pa.array([-1, 7, None, 1, *[2] * 56]))
    found: list[Counter[str | None]] = []
    for number, metadata in enumerate(
        (table.schema.metadata[b"huggingface"], b"[", b'{"info": {"features": 3}}', None)
    ):
        changed = table.replace_schema_metadata(None if metadata is None else {"huggingface": metadata})
        pq.write_table(changed, tmp_path / "c.parquet")
        other = make({"c.parquet": (tmp_path / "c.parquet").read_bytes()}, f"c{number}")
        found.append(Counter(row["label"] for row in rows(other)))
    assert found[0] == {None: 2, "7": 1, "delivery": 1, "other": 56}
    assert found[1] == found[2] == found[3] == {"-1": 1, None: 1, "7": 1, "1": 1, "2": 56}


def test_a_folder_that_is_not_whole_is_refused(store: FolderStore, save: Callable[..., None]) -> None:
    save(_data(_rows(10)), "lake/one")
    state = json.loads(store.get("lake/one/state.json"))
    for name in ("gone.arrow", "../../ledger/secret", "/etc/passwd", None):
        store.put("lake/one/state.json", json.dumps({**state, "_data_files": [{"filename": name}]}).encode())
        with pytest.raises(DataError, match=r"lake/one/state\.json.*which is not there.*`save_to_disk`"):
            pin(store, Source(prefix="lake/one"), "fam")
    for bad in (b"[", b"[]", b"{}"):
        store.put("lake/one/state.json", bad)
        with pytest.raises(DataError, match=r"lake/one/state\.json"):
            pin(store, Source(prefix="lake/one"), "fam")
    store.put("lake/two/dataset_dict.json", b'{"splits": ["../one"]}')
    with pytest.raises(DataError, match=r"it is not there"):
        pin(store, Source(prefix="lake/two"), "fam")


def test_a_recipe_in_a_prefix_is_none_though_its_state_names_it(store: FolderStore, save: Callable[..., None]) -> None:
    save(_data(_rows(10)), "lake/one")
    files = [file.key for file in pin(store, Source(prefix="lake/one"), "fam").files]
    state = json.loads(store.get("lake/one/state.json"))
    state["_data_files"].append({"filename": layout.RECIPE})
    store.put("lake/one/state.json", json.dumps(state).encode())
    store.put(f"lake/one/{layout.RECIPE}", b"train: {max_steps: 1}\n")
    assert [file.key for file in pin(store, Source(prefix="lake/one"), "fam").files] == files


def test_names_of_classes_that_are_as_long_as_texts_are_none(tmp_path: Path) -> None:
    """One stands once in the file, and would stand in each of its rows."""
    features = {
        "label": {"_type": "ClassLabel", "names": ["x" * 60_000]},
        "kind": {"_type": "ClassLabel", "names": ["y"]},
        "kinds": {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": ["z"]}},
        "before": [{"_type": "ClassLabel", "names": ["a"]}],  # as datasets wrote a list before version 4
        "texts": {"_type": "List", "feature": {"_type": "Value", "dtype": "string"}},
    }
    schema = pa.schema({"text": pa.string()}, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    assert class_names(schema) == {"kind": ["y"], "kinds": ["z"], "before": ["a"]}


def test_a_list_of_files_is_read_to_its_bound_whatever_its_size_was(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("lake/four/state.json", b"{" + b" " * 1000 + b"}")
    small = ObjectInfo("lake/four/state.json", 2, "")  # as it was when it was looked at
    monkeypatch.setattr(store, "stat", lambda _: small)
    monkeypatch.setattr(saved, "_LARGEST", 1000)
    with pytest.raises(DataError, match=r"file lake/four/state\.json: .*more than 1,000 bytes.*`save_to_disk`"):
        saved.saved_files(store, "lake/four/", {"state.json", "dataset_info.json"})
