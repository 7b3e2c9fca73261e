"""What a run's page reads of its folder, where pods write what they like."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from dropforge_airflow.pages import folder

from dropforge import layout
from dropforge.json_objects import MOST, UnreadableError, find_object, read_object
from dropforge.store import FolderStore


def test_the_end_of_a_log_takes_no_more_than_its_bound(tmp_path: Path) -> None:
    store, prefix = FolderStore(tmp_path), layout.logs_prefix("fam-1")
    honest = "".join(f"{number}\n" for number in range(1000))
    store.put(f"{prefix}honest/1.log.gz", gzip.compress(honest.encode()))
    store.put(f"{prefix}bomb/1.log.gz", gzip.compress(b"first\n" + bytes(40 << 20)))
    for name, size in (("zeros", 40 << 20), ("empty", 0)):
        path = tmp_path / prefix / name / "999999999999999.log.gz"
        path.parent.mkdir()
        with path.open("wb") as file:
            file.truncate(size)
    tracemalloc.start()
    found = folder.tails(store, "fam-1")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 35 << 20  # a line as long as the bound, and as text
    assert found["honest"] == [str(number) for number in range(800, 1000)]
    assert (found["zeros"], found["empty"], found["bomb"][0], len(found["bomb"])) == ([], [], "first", 2)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a.json", json.dumps({"a": 1}).encode())
    store.put("long.json", json.dumps({"a": "x" * (2 << 20)}).encode())
    found = [find_object(store, name, most=folder._LARGEST) for name in ("a.json", "long.json")]
    assert found == [{"a": 1}, {}]
    assert read_object(store, "a.json") == {"a": 1}
    store.put("longer.json", b'{"a": "' + b"x" * MOST + b'"}')
    with pytest.raises(UnreadableError, match=r"longer\.json: it cannot be read: it has more than"):
        read_object(store, "longer.json")
