"""A store keeps its promises, on S3 and in a folder."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dropforge.errors import DropforgeError
from dropforge.store import FolderStore, MissingObjectError, Store, open_store, split_uri


def test_what_was_put_is_read_back(store: Store) -> None:
    store.put("a/b c+d%.bin", b"\0\1")
    assert store.get("a/b c+d%.bin") == b"\0\1"
    info = store.stat("a/b c+d%.bin")
    assert info is not None
    assert info.size == 2


def test_a_missing_object_is_named(store: Store) -> None:
    assert store.stat("nothing") is None
    with pytest.raises(MissingObjectError, match="nothing"):
        store.get("nothing")
    store.delete("nothing")


def test_only_one_of_many_racers_writes(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.put_if_absent("claim", str(number).encode()), range(16)))
    assert won.count(True) == 1
    assert store.get("claim") == str(won.index(True)).encode()


def test_replace_needs_the_current_tag(store: Store) -> None:
    store.put("k", b"one")
    info = store.stat("k")
    assert info is not None
    assert store.put_if_match("k", b"two", info.etag)
    assert not store.put_if_match("k", b"three", info.etag)
    assert store.get("k") == b"two"
    assert not store.put_if_match("absent", b"x", info.etag)


def test_listing_is_by_prefix_and_in_order(store: Store) -> None:
    for key in ("d/b", "d/a", "d/c/x", "e", "dd"):
        store.put(key, b"")
    assert [info.key for info in store.list("d/")] == ["d/a", "d/b", "d/c/x"]


def test_an_object_that_changed_is_not_read(store: Store) -> None:
    store.put("k", b"one")
    info = store.stat("k")
    assert info is not None
    store.open("k", info.etag).close()
    store.put("k", b"two")
    with pytest.raises(DropforgeError, match="changed"):
        store.open("k", info.etag)


def test_a_full_disk_keeps_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (FolderStore(tmp_path).put, FolderStore(tmp_path).put_if_absent):
        with pytest.raises(OSError, match="No space left"):
            write("a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_files_go_up_and_come_down(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    store.upload(source, "up/load")
    store.download("up/load", tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target").read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]


@pytest.mark.parametrize("key", ["../out", "a/../../out", "/etc/out"])
def test_a_folder_store_keeps_to_its_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(DropforgeError, match="leaves"):
        FolderStore(tmp_path / "store").put(key, b"")


def test_addresses(aws: str, tmp_path: Path) -> None:
    assert open_store("s3://bucket/a/b").uri == "s3://bucket/a/b"
    assert open_store(str(tmp_path)).uri == str(tmp_path)
    assert split_uri("s3://b/runs/r/run.json") == ("s3://b/runs/r", "run.json")
