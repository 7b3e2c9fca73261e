"""What is nested without an end, and offsets and names that lie: they end alone, never the process that reads them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curation import kernel
from curation.canonical import canonical
from curation.parquet import row_groups
from curation.parquet_footer import levels, open_parquet, pages_end
from curation.plan import cut, make_rules
from curation.readers import read
from curation.reasons import Reason, RejectError
from curation.records import Fault, Found, Record
from curation.sample import guess_rows
from curation.schema import unread
from curation.task import Report, Task
from dropforge.recipes import load_recipe


def records(path: Path) -> list[Record]:
    return [record for split in cut(path, path.name) for record in read(split, max_row_bytes=1_000_000)]


def arrow_file(path: Path, table: pa.Table) -> bytes:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path.read_bytes()


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def nested_footer(deep: int, wide: int = 0) -> bytes:
    """A Parquet file without rows: one column nested so deep, and so many plain ones beside it."""
    group, leaf = b"\x35\x02\x18\x01a\x15\x02\0", b"\x15\x0c\x25\x02\x18\x01b\0"
    root = b"\x48\x01s\x15" + varint(2 * (wide + 1)) + b"\0"
    elements = [root, *[leaf] * wide, *[group] * deep, leaf]
    metadata = b"\x15\x02\x19\xfc" + varint(len(elements)) + b"".join(elements) + b"\x16\0\x19\x0c\0"
    return b"PAR1" + metadata + struct.pack("<I", len(metadata)) + b"PAR1"


def footer(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


_READ = """
import sys
from pathlib import Path
from curation.plan import cut
from curation.readers import read
for path in map(Path, sys.argv[1:]):
    print(*[record.reason.value for split in cut(path, path.name) for record in read(split, max_row_bytes=1_000_000)])
"""


def test_offsets_and_schemas_that_would_end_the_process_make_a_bad_file(tmp_path: Path) -> None:
    """In a process of its own, which they would end."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    arrow, parquet = tmp_path / "x.arrow", tmp_path / "x.parquet"
    data = arrow_file(arrow, pa.table({"messages": [turns] * 4}))
    sound, far = struct.pack("<5i", 0, 2, 4, 6, 8), struct.pack("<5i", 1 << 28, 1 << 29, 1 << 29, 1 << 29, 0x7FFFFFFF)
    assert sound in data
    arrow.write_bytes(data.replace(sound, far, 1))
    parquet.write_bytes(nested_footer(20_000))
    other, joined = tmp_path / "y.parquet", tmp_path / "z.parquet"
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(9)]}), other)
    whole, said = other.read_bytes(), footer(other)
    # Of a column's size statistics a histogram of three levels, where there are two.
    told = said.replace(b"\x19\x26\x00\x12", b"\x19\x36\x00\x00\x12")
    assert len(told) == len(said) + 1
    other.write_bytes(whole[: -8 - len(said)] + told + struct.pack("<I", len(told)) + b"PAR1")
    # A second footer between pages and footer, whose schema is nested deeply.
    joined.write_bytes(whole[: -8 - len(said)] + nested_footer(20_000)[4:] + b"PAR1" + whole[-8 - len(said) :])
    command = [sys.executable, "-c", _READ, *map(str, (arrow, parquet, other, joined))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["bad_arrow", "bad_parquet", "bad_parquet", "bad_parquet"]


@pytest.mark.parametrize(("deep", "wide"), [(101, 0), (3_000, 0), (3_000, 3_000)])
def test_each_opening_of_a_parquet_file_refuses_a_deep_schema(tmp_path: Path, deep: int, wide: int) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(nested_footer(deep, wide))
    with pytest.raises(pa.ArrowInvalid, match="nested more than 100 deep"):
        open_parquet(path)
    assert row_groups(path) == []
    assert guess_rows(path, path.name, 1_000) == 1
    (split,) = cut(path, path.name)
    assert unread(split, {"text"}) == {}
    (fault,) = records(path)
    assert isinstance(fault, Fault)
    assert fault.reason == Reason.BAD_PARQUET
    assert "nested more than 100 deep" in fault.detail


def test_a_file_with_very_many_columns_or_row_groups_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    path.write_bytes(nested_footer(50, 5_000))
    assert len(open_parquet(path).schema_arrow) == 5_001
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(4_100)]}), path, row_group_size=1)
    assert len(row_groups(path)) == 4_100


def test_levels_are_counted_whatever_else_a_footer_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    turns = pa.array([[{"role": "user", "content": ["a"]}]])
    pairs = pa.array([[("k", 1.5)]], pa.map_(pa.string(), pa.float64()))
    table = pa.table({"turns": turns, "pairs": pairs, "times": pa.array([1], pa.timestamp("us", "UTC"))})
    pq.write_table(table, path, compression="zstd")
    assert levels(footer(path)) == 6  # the root, and two for each list and one for each struct
    assert levels(nested_footer(30)[4:-8]) == 31
    group = pq.read_metadata(path).row_group(0)
    ends = [
        (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
        for column in map(group.column, range(group.num_columns))
    ]
    assert pages_end(footer(path)) == max(ends)
    for cut_at in range(1, len(footer(path)) - 1, 7):
        with pytest.raises(IndexError):
            levels(footer(path)[:cut_at])
    with pytest.raises(IndexError):  # a list of 2 billion of bytes, where there are none
        levels(b"\x39\xf3\xff\xff\xff\xff\x07")


def test_maps_that_say_how_many_they_have_take_the_room_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(30)]}), path)
    data, last = path.read_bytes(), footer(path)
    within = b"\x5b" + b"\xc8\x65\xbb" * 4_000 + bytes(1_000)  # a map of 13,000 maps, whose first is one of 13,000
    for _ in range(16):  # as ends of files
        within += len(within).to_bytes(4, "little") + b"PAR1PAR1"
    path.write_bytes(data[: -8 - len(last)] + within + data[-8 - len(last) :])
    tracemalloc.start()
    try:
        assert open_parquet(path).metadata.num_rows == 30
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    for claimed in (b"\x1b\xff\xff\xff\xff\x7f\x33", b"\x1b\xff\xff\xff\xff\x7f\x11", b"\x1b\x02\xb3"):
        with pytest.raises(IndexError):  # of which there are none
            levels(claimed)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_whose_name_is_no_utf8_is_a_bad_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    table = pa.table({"text": ["hello"], "odd-name": [1]})
    if kind == "parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        arrow_file(path, table)
    path.write_bytes(path.read_bytes().replace(b"odd-name", b"odd\xff\xfeame"))
    (split,) = cut(path, path.name)
    assert unread(split, {"text"}) == {}
    (fault,) = records(path)
    assert isinstance(fault, Fault)
    assert fault.reason == (Reason.BAD_PARQUET if kind == "parquet" else Reason.BAD_ARROW)


DEEP = "[" * 600 + "]" * 600
TURNS = '[{"role": "user", "content": %s}, {"role": "assistant", "content": "x"}]'
CALL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": TURNS % DEEP},
        {"messages": f'[{{"role": {DEEP}, "content": "a"}}]'},
        {"messages": f'{{"role": [{DEEP}], "content": ["a"]}}'},
        {"messages": TURNS % ("[" * 100_000)},
        {"messages": CALL, "tools": f'[{{"name": "look", "parameters": {DEEP}}}]'},
        {"messages": [CALL[0], {"role": "assistant", "content": "", "tool_calls": f'[{{"name": "a", "b": {DEEP}}}]'}]},
        {
            "messages": [
                CALL[0],
                {"role": "assistant", "tool_calls": [{"name": "a", "arguments": f'{{"b": {DEEP}}}'}]},
            ]
        },
        {"messages": [CALL[0], {"role": "function_call", "content": f'{{"name": "a", "arguments": {{"b": {DEEP}}}}}'}]},
    ],
)
def test_json_text_within_a_row_is_nested_no_deeper_than_a_row(fields: dict[str, object]) -> None:
    with pytest.raises(RejectError) as refused:
        canonical(fields)
    assert refused.value.reason == Reason.TOO_DEEP


def test_brackets_in_the_text_of_a_message_are_text() -> None:
    said = "[" * 500
    assert canonical({"messages": TURNS % json.dumps(said)}).contents == (said, "x")


def test_a_row_that_nothing_has_bounded_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello"}\n')
    value: object = "x"
    for _ in range(5_000):
        value = [value]
    found = [Found(0, {"text": value}, b"head"), Found(1, {"text": "hello"}, b"")]
    monkeypatch.setattr(kernel, "read", lambda *_, **__: iter(found))
    (split,) = cut(path, path.name)
    task = Task("t", split, 0, path.name, make_rules(load_recipe("tiny", {})), tmp_path)
    deep, sound = kernel.canonical_rows(task, Report(0))
    assert isinstance(deep, Fault)
    assert deep.reason == Reason.TOO_DEEP
    assert isinstance(sound, kernel.Canonical)
