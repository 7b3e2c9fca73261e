"""Tables of few bytes that would take many gigabytes: they end alone, within the bound of a file's memory."""

from __future__ import annotations

import gzip
import io
import json
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

from curation import curate, kernel, memory
from curation.canonical import Row
from curation.expanded import sizes
from curation.memory import bound_of, bounded
from curation.plan import cut
from curation.readers import read
from curation.reasons import Reason
from curation.records import Fault, Found
from curation.streams import Limits
from dropforge.dataset import Manifest
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
    """Parquet's metadata alone, in thrift: one row group with half a million columns, which take 600 bytes each."""
    columns = b"\x19\xfc\xa0\xc2\x1e" + b"\x26\0\0" * 500_000
    sound = b"\x15\x02\x19\x1c\x48\x01a\0\x16\0"  # version, schema of one element, no rows
    metadata = sound + b"\x19\x1c" + columns + b"\x16\x02\x16\x02\0\0"
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


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("column", ["text", "unknown"])
def test_rows_of_nothing_count_as_a_bomb_where_they_are_too_many(tmp_path: Path, name: str, column: str) -> None:
    """A few hundred bytes say that there are a hundred million."""
    table = pa.table({column: pa.nulls(100_000_000)}) if name == "a.arrow" else pa.table({column: pa.nulls(3_000_000)})
    path = tmp_path / "file"
    path.write_bytes(stream(table) if name == "a.arrow" else parquet(table))
    most = 5_000 if name == "a.arrow" else max(5_000, path.stat().st_size)
    [split] = cut(path, name)
    records = list(read(split, max_row_bytes=ROW, limits=Limits(rows=5_000)))
    assert [record.position for record in records] == list(range(most + 1))
    assert isinstance(records[-1], Fault)
    assert records[-1].reason == Reason.BOMB
    assert f"more than {most} rows" in records[-1].detail


def test_rows_of_few_values_are_all_read_where_they_are_no_more_than_allowed(tmp_path: Path) -> None:
    text = pa.array(["yes", "no"] * 5_000)
    path = tmp_path / "file"
    path.write_bytes(parquet(pa.table({"text": text}), compression="zstd"))
    [split] = cut(path, "a.parquet")
    assert path.stat().st_size < 10_000
    assert len(list(read(split, max_row_bytes=ROW, limits=Limits(rows=10_000)))) == 10_000


DAYS, ZONE = pa.list_(pa.date32()), pa.timestamp("us", "Nowhere/City")
LATE = [
    ("a.parquet", pa.array([1, 2**31 - 1, 3], pa.date32())),
    ("a.parquet", pa.array([1, 2**62, -(2**62), 3], pa.timestamp("us"))),
    ("a.parquet", pa.array([1, -62135596800 * 10**6 - 1, 3], pa.timestamp("us", "Etc/GMT+5"))),
    ("a.parquet", pa.array([1, 2**62, 3], pa.time64("us"))),
    ("a.parquet", pa.array([[1], [2, 2**31 - 1], [3]], DAYS)),
    ("a.parquet", pa.array([{"day": 1}, {"day": 2**31 - 1}, None], pa.struct({"day": pa.date32()}))),
    ("a.arrow", pa.array([1, 2**62, 3], pa.timestamp("s"))),
    ("a.arrow", pa.array([1, 2**40, 3], pa.timestamp("s"))),
    ("a.arrow", pa.array([1, 2**55, 3], pa.timestamp("ms"))),
    ("a.arrow", pa.array([1, 2**62, 3], pa.duration("s"))),
    ("a.arrow", pa.array([86_400_000, 2**62 // 86_400_000 * 86_400_000, 0], pa.date64())),
    ("a.arrow", pa.array([1, 2**31 - 1, 3], pa.date32()).dictionary_encode()),
    ("a.arrow", pa.array([None, [("a", 1)], []], pa.map_(pa.string(), ZONE))),
]


@pytest.mark.parametrize(("name", "label"), LATE)
def test_a_date_that_python_does_not_have_takes_its_row_alone(tmp_path: Path, name: str, label: pa.Array) -> None:
    path, rows = tmp_path / "file", len(label)
    table = pa.table({"text": [f"row {n}" for n in range(rows)], "label": label})
    path.write_bytes(stream(table) if name == "a.arrow" else parquet(table))
    [split] = cut(path, name)
    records = list(read(split, max_row_bytes=ROW))
    assert [record.position for record in records] == list(range(rows))
    lost = [record for record in records if isinstance(record, Fault)]
    assert [(record.position, record.reason, record.detail) for record in lost] == [
        (at, Reason.BAD_TIME, "column 'label'") for at in range(1, rows - 1)
    ]
    assert [record.fields["text"] for record in records if isinstance(record, Found)] == ["row 0", f"row {rows - 1}"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_drop_with_a_date_that_python_does_not_have_is_curated(
    store: FolderStore,
    upload: Callable[..., Drop],
    texts: Callable[..., list[bytes]],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    name: str,
) -> None:
    said = [json.loads(line)["text"] for line in texts(300)]
    table = pa.table({"text": said, "source": pa.array([None] * 299 + [2**62], pa.timestamp("us"))})
    drop = upload({name: stream(table) if name == "a.arrow" else parquet(table)})
    made = curate(store, drop, recipe(workers=1), workdir=tmp_path / "w")
    assert (made.counts["input"], made.counts["bad_time"]) == (300, 1)
    assert f'"file": "{name}"' in next((tmp_path / "w").rglob("quarantine.jsonl")).read_text()


def one_value(rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * ROW]))


@pytest.mark.parametrize("kind", ["parquet", "dictionary", "view", "runs", "list"])
def test_what_rows_share_counts_in_each_of_them(tmp_path: Path, kind: str) -> None:
    """Also where a batch of them is no longer than a row may be."""
    rows, value = 3_000, "x" * ROW
    text = one_value(rows)
    if kind == "runs":
        text = pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([value]))
    elif kind == "view":
        one = pa.array([value], pa.string_view()).buffers()
        text = pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(one[1].to_pybytes() * rows), *one[2:]])
    elif kind == "list":
        text = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), text)
    path = tmp_path / "file"
    path.write_bytes(parquet(pa.table({"text": text})) if kind == "parquet" else stream(pa.table({"text": text})))
    [split] = cut(path, "a.parquet" if kind == "parquet" else "a.arrow")
    size = chars = 0
    for record in read(split, max_row_bytes=8_000_000, limits=Limits(free=1 << 20)):
        last = record
        if isinstance(record, Found):
            size += 1
            chars += len("".join(record.fields["text"]))
    assert isinstance(last, Fault)
    assert last.reason == Reason.BOMB
    assert size == last.position
    assert chars <= 250 * path.stat().st_size


@pytest.mark.parametrize("within", ["list", "struct", "list of structs", "list view", "fixed list", "map"])
def test_a_row_of_shared_values_within_lists_and_structs_is_too_large_by_what_it_becomes(
    tmp_path: Path, within: str
) -> None:
    many, value = 10, one_value(30)
    starts = pa.array([0, many, 2 * many, 3 * many], pa.int32())
    column = {
        "list": lambda: pa.ListArray.from_arrays(starts, value),
        "struct": lambda: pa.StructArray.from_arrays([one_value(3)] * many, [str(at) for at in range(many)]),
        "list of structs": lambda: pa.ListArray.from_arrays(starts, pa.StructArray.from_arrays([value], ["a"])),
        "list view": lambda: pa.ListViewArray.from_arrays(starts[:3], pa.array([many] * 3, pa.int32()), value),
        "fixed list": lambda: pa.FixedSizeListArray.from_arrays(value, many),
        "map": lambda: pa.MapArray.from_arrays(starts, pa.array([str(at) for at in range(30)]), value),
    }[within]()
    table = pa.table({"text": pa.array(["a", "b", "c"]), "messages": column})
    path = tmp_path / "file"
    path.write_bytes(stream(table))
    [split] = cut(path, "a.arrow")
    records = list(read(split, max_row_bytes=many * ROW - 1))
    assert [(record.position, getattr(record, "reason", "row")) for record in records] == [
        (at, Reason.TOO_LARGE) for at in range(3)
    ]
    assert [type(record) for record in read(split, max_row_bytes=many * ROW + 1_000)] == [Found] * 3


def test_sizes_are_those_of_each_value() -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1], pa.int8()), pa.array(["a", "bcd"]))
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3, 5, 9], pa.int32()), pa.array(["a", "bb", None]))
    assert sizes(shared.slice(1)).tolist() == [3, 0, 3]
    assert sizes(runs.slice(2, 4)).tolist() == [1, 2, 2, 0]
    assert sizes(pa.array(["a", None, "b" * 40], pa.string_view()).slice(1)).tolist() == [0, 40]
    assert sizes(pa.array([], pa.string_view())).tolist() == []
    assert sizes(pa.ListArray.from_arrays(pa.array([0, 2, 2, 4], pa.int32()), shared).slice(1)).tolist() == [0, 19]
    union = pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["x" * 20])]
    )
    assert sizes(union).tolist() == [20, 20]


def test_a_row_that_becomes_too_much_ends_alone(
    make: Callable[..., Manifest], texts: Callable[..., list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, named = kernel.canonical, kernel.names

    def refused(fields: dict[str, object], *how: object) -> Row:
        if fields["text"] == "one":
            raise MemoryError
        return whole(fields, *how)

    def nameless(row: Row) -> tuple[bytes, bytes, int, bytes | None]:
        if row.text == "two":
            raise MemoryError
        return named(row)

    monkeypatch.setattr(kernel, "canonical", refused)
    monkeypatch.setattr(kernel, "names", nameless)
    made = make({"a.jsonl": b"\n".join([b'{"text": "one"}', b'{"text": "two"}', *texts(30)])})
    assert (made.counts["input"], made.counts["needs_memory"]) == (32, 2)
