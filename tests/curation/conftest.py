"""A drop in a folder store, made of named files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import curation
from dropforge.dataset import Manifest
from dropforge.drop import Drop, read_drop
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

Curate = Callable[..., Manifest]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "bucket")


@pytest.fixture
def upload(store: FolderStore) -> Callable[..., Drop]:
    def upload(files: Mapping[str, bytes], name: str = "d1") -> Drop:
        for key, data in files.items():
            store.put(f"drops/fam/{name}/{key}", data)
        store.put(f"drops/fam/{name}/_SUCCESS", b"")
        return read_drop(store, "fam", name)

    return upload


def _recipe(data: Mapping[str, Any] | None = None, task: str = "causal-lm", **curation_values: Any) -> Recipe:
    values: dict[str, Any] = {"task": task, "data": dict(data or {}), "curation": {"workers": 1, **curation_values}}
    if task == "sequence-to-sequence":
        values["base"] = {"model": "an/encoder-decoder"}
    return load_recipe("tiny", values)


@pytest.fixture
def make(store: FolderStore, upload: Callable[..., Drop], tmp_path: Path) -> Curate:
    """Upload files and curate them."""

    def make(
        files: Mapping[str, bytes], name: str = "d1", data: Mapping[str, Any] | None = None, **values: Any
    ) -> Manifest:
        drop = upload(files, name)
        return curation.curate(store, drop, _recipe(data, **values), workdir=tmp_path / f"work-{name}")

    return make


@pytest.fixture
def rows(store: FolderStore) -> Callable[..., list[dict[str, Any]]]:
    """The rows of a dataset version, split by split in the order of their shards."""

    def rows(manifest: Manifest, split: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for shard in manifest.shards:
            if split in {None, shard.split}:
                table = pq.read_table(store.root / shard.key)
                found += [{**row, "split": shard.split} for row in table.to_pylist()]
        return found

    return rows


@pytest.fixture
def ledger(store: FolderStore) -> Callable[[Manifest], list[dict[str, Any]]]:
    return lambda manifest: pq.read_table(store.root / manifest.files["ledger"]).to_pylist()


@pytest.fixture
def quarantine(store: FolderStore) -> Callable[[Manifest], list[dict[str, Any]]]:
    def quarantine(manifest: Manifest) -> list[dict[str, Any]]:
        return [json.loads(line) for line in store.get(manifest.files["quarantine"]).splitlines()]

    return quarantine


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    return _recipe


@pytest.fixture
def texts() -> Callable[..., list[bytes]]:
    return _texts


def _texts(count: int, start: int = 0) -> list[bytes]:
    """JSON lines that differ."""
    return [json.dumps({"text": f"row number {index} of the test"}).encode() for index in range(start, start + count)]
