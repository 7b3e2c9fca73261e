"""Tables of few bytes that would take many gigabytes: they end alone, within the bound of a file's memory."""

from __future__ import annotations

import gzip
import io
import resource
import struct
import threading
import zlib
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curation import curate, memory
from curation.memory import bound_of, bounded
from curation.plan import cut
from curation.readers import read
from curation.reasons import Reason
from curation.records import Fault, Found
from dropforge.drop import Drop
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

ROW = 400_000  # bytes of a long value; a row may have a few more
FREE = 32 << 20


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that small files reach."""
    monkeypatch.setattr(memory, "_FREE", FREE)


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as target:
        target.write_table(table)
    return bytes(sink.getvalue())


#: Parquet as pyarrow writes it, packed by zlib: one row, whose list has 120,000,000 values that are not there.
NULLS = (
    "eNoLcAwyFGURZRAV8gESDEIMDBpb9f8qMDAyAHmiWqI2OqINO3YUiQqIsomyyTBApUVXMjCwAznM/z5s31HEyApkglQxMYiySPqY"
    "MkiwFSdnpOYmijIxmDJJcOSmFhcnpqcWizKJsvnYANWaskiw5GQWlwDlRZlUmSTYU3NSc1PzSlTlfNYIcwgCVYgxScpIyqgxyIgy"
    "SZoysAlIWsBNAeuE6RDlEQNZLFYkNo1RzUyNQ1MH7BkmkOMFgJSNptquomNHtxdJukGcyAAyvEiMSY0DqINBQ6EgsaiwNLVEN7mg"
    "QDexqCi/XKEstag4Mz9PwchUz0DPUFIG5OnrQBwADCkAabZE4A=="
)


def nulls() -> bytes:
    return zlib.decompress(b64decode(NULLS))


def footer() -> bytes:
    """Parquet's metadata alone, in thrift: a million row groups, two of them with a million columns each."""

    def million(elements: bytes) -> bytes:
        return b"\x19\xfc\xbf\x84\x3d" + elements

    columns = million(b"\x26\0\0" * 999_999)
    sound = b"\x15\x02\x19\x1c\x48\x01a\0\x16\0"  # version, schema of one element, no rows
    metadata = sound + million(columns + b"\x16\x02\x16\x02\0" + million(b""))
    return b"PAR1" + metadata + struct.pack("<I", len(metadata)) + b"PAR1"


def claim() -> bytes:
    """A stream whose one compressed text says that it is a terabyte."""
    text = "x" * 5_000
    data = stream(pa.table({"text": [text]}), "zstd")
    said = struct.pack("<q", len(text))
    assert data.count(said + b"\x28\xb5\x2f\xfd") == 1
    return data.replace(said + b"\x28\xb5\x2f\xfd", struct.pack("<q", 1 << 40) + b"\x28\xb5\x2f\xfd")


@pytest.mark.parametrize(("name", "make"), [("a.parquet", nulls), ("a.parquet", footer), ("a.arrow", claim)])
def test_a_table_that_takes_too_much_memory_is_quarantined_and_the_others_are_curated(
    store: FolderStore,
    upload: Callable[..., Drop],
    texts: Callable[..., list[bytes]],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    name: str,
    make: Callable[[], bytes],
) -> None:
    data = make()
    drop = upload({name: data, "b.jsonl": b"\n".join(texts(30))})
    made = curate(store, drop, recipe(workers=1), workdir=tmp_path / "w")
    assert made.counts["needs_memory"] == 1
    assert made.counts["input"] == 31
    quarantine = next((tmp_path / "w").rglob("quarantine.jsonl")).read_text()
    assert f'"file": "{name}"' in quarantine
    assert f"more than {bound_of(8_000_000) >> 20} MiB of memory" in quarantine


@pytest.mark.parametrize("stored", [True, False], ids=["as it was made", "as plain text"])
def test_a_long_value_that_many_rows_share_is_read_a_few_rows_at_a_time(tmp_path: Path, stored: bool) -> None:
    """256 rows of it at once are beyond the bound, and none alone is: every row is read."""
    rows = 300
    text = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (rows // 2), pa.int32()), pa.array(["short", "x" * ROW]))
    path = tmp_path / "file"
    path.write_bytes(parquet(pa.table({"text": text}), store_schema=stored))
    [split] = cut(path, "a.parquet")
    lengths = [
        len(record.fields["text"]) for record in read(split, max_row_bytes=ROW + 1_000) if isinstance(record, Found)
    ]
    assert lengths == [5, ROW] * (rows // 2)


@pytest.mark.parametrize("kind", ["dictionary", "view", "runs"])
def test_rows_that_share_a_long_value_count_as_a_bomb_where_they_are_too_many(tmp_path: Path, kind: str) -> None:
    rows = 2_000
    value = "x" * ROW
    if kind == "dictionary":
        text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int16()), pa.array([value]))
    elif kind == "runs":
        text = pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([value]))
    else:
        one = pa.array([value], pa.string_view()).buffers()
        text = pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(one[1].to_pybytes() * rows), *one[2:]])
    path = tmp_path / "file"
    path.write_bytes(stream(pa.table({"text": text})))
    [split] = cut(path, "a.arrow")
    records = list(read(split, max_row_bytes=ROW + 1_000))
    assert isinstance(records[-1], Fault)
    assert records[-1].reason == Reason.BOMB
    assert [record.position for record in records] == list(range(len(records)))
    assert 100 < len(records) < 400, "a file of 400 KB may hold 250 times as much"


def test_the_limit_is_set_once_and_taken_back_by_the_last_thread() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with bounded(0):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    assert limit != before
    with bounded(1 << 30):
        assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    leave.set()
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("kept", [False, True], ids=["texts", "kept columns"])
def test_many_long_rows_are_sorted_in_little_memory_in_one_order(
    store: FolderStore,
    upload: Callable[..., Drop],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
) -> None:
    """What DuckDB cannot put aside while it sorts comes in parts, and the dataset is the same."""
    long = b"x" * 2_000_000
    row = b'{"text": "a %d", "more": "' if kept else b'{"text": "a %d '
    drop = upload({"a.jsonl.gz": gzip.compress(b"".join(row % at + long + b'"}\n' for at in range(60)), 1)})
    asked = recipe(workers=1, memory="64MB")
    if kept:
        asked = asked.model_copy(update={"data": asked.data.model_copy(update={"keep_columns": "all"})})
    monkeypatch.setattr("curation.exchange._AT_ONCE", 5_000_000)
    made = curate(store, drop, asked, workdir=tmp_path / "w")
    assert made.counts["train"] + made.counts["eval"] == 60
    for split in ("train", "eval"):
        found = [
            pq.read_table(path)["key"].to_pylist() for path in sorted((tmp_path / "w").rglob(f"{split}/*.parquet"))
        ]
        assert len(keys := [key for part in found for key in part]) == len(set(keys)) == made.counts[split]
        assert all(part == sorted(part) for part in found)
