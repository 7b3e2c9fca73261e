"""Golden tables: what each kind of bad input becomes. Every input row is found once, its neighbours survive."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from curation.csv_rows import _Feed
from curation.dialect import Quotes
from curation.formats import BOM
from curation.lines import lines
from curation.plan import cut
from curation.readers import read
from curation.reasons import Reason
from curation.records import Blank, Fault, Found, Line
from curation.streams import Limits
from curation.values import values

GOOD = b'{"text": "good"}'


def found(
    tmp_path: Path,
    name: str,
    data: bytes,
    limit: int = 1_000_000,
    limits: Limits = Limits(),  # noqa: B008
) -> list[tuple[int, Any]]:
    """(place, fields or reason) of every record of a file, blank lines left out."""
    path = tmp_path / "file"
    path.write_bytes(data)
    result: list[tuple[int, Any]] = []
    for split in cut(path, name):
        for record in read(split, max_row_bytes=limit, limits=limits):
            if isinstance(record, Found):
                result.append((record.position, dict(record.fields)))
            elif isinstance(record, Fault):
                result.append((record.position, record.reason))
    return result


def kinds(records: list[tuple[int, Any]]) -> list[Any]:
    return [value if isinstance(value, Reason) else "row" for _, value in records]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', Reason.BAD_JSON),
        (b'{"text": "a"} {"text": "b"}', Reason.BAD_JSON),
        (b"not json at all", Reason.BAD_JSON),
        (b'{"text": "bad \xff byte"}', Reason.BAD_ENCODING),
        (b'{"text": "latin \xe9"}', Reason.BAD_ENCODING),
        (b'{"text": "\xed\xa0\x80"}', Reason.BAD_ENCODING),
        (b'{"text": "a", "score": NaN}', Reason.BAD_NUMBER),
        (b'{"text": "a", "score": -Infinity}', Reason.BAD_NUMBER),
        (b'{"text": "a", "text": "b"}', Reason.DUPLICATE_FIELD),
        (b'{"a": {"b": 1, "b": 2}}', Reason.DUPLICATE_FIELD),
        (b"[" * 10_000 + b"]" * 10_000, Reason.TOO_DEEP),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, Reason.TOO_DEEP),
        (b'{"a":' * 101 + b"1" + b"}" * 101, Reason.TOO_DEEP),
        (b'["an", "array"]', Reason.NOT_AN_OBJECT),
        (b"17", Reason.NOT_AN_OBJECT),
        (b"null", Reason.NOT_AN_OBJECT),
        (b'{"text": "raw \x00 nul"}', Reason.NUL),
        (b'{"text": "' + b"x" * 100_000 + b'"}', Reason.TOO_LARGE),
        (b'{"n": ' + b"9" * 5_000 + b"}", Reason.BAD_JSON),
    ],
)
def test_bad_json_line_is_one_record_and_neighbours_survive(tmp_path: Path, line: bytes, reason: Reason) -> None:
    records = found(tmp_path, "a.jsonl", GOOD + b"\n" + line + b"\n" + GOOD + b"\n", limit=80_000)
    assert records == [(0, {"text": "good"}), (len(GOOD) + 1, reason), (len(GOOD) + len(line) + 2, {"text": "good"})]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"text": "cut', Reason.TORN_FILE),
        (b'{"text": "Gr\xc3', Reason.TORN_FILE),
        (b'{"text": "a", "meta": {"n": 1}', Reason.TORN_FILE),
        (b'{"text": "latin \xe9"}', Reason.BAD_ENCODING),
        (b'{"text": a}', Reason.BAD_JSON),
        (b"(60 rows, and {", Reason.BAD_JSON),
    ],
)
def test_a_file_that_ends_within_a_row_is_torn(tmp_path: Path, row: bytes, reason: Reason) -> None:
    assert found(tmp_path, "a.jsonl", GOOD + b"\n" + row) == [(0, {"text": "good"}), (len(GOOD) + 1, reason)]


def test_a_table_that_ends_within_a_cell_in_quotes_is_torn(tmp_path: Path) -> None:
    table = b'text,label\n"good",a\n'
    for end, reason in (
        (b'"cut, as', Reason.TORN_FILE),
        (b'"open\n', Reason.BAD_QUOTES),
        (b'"a" b', Reason.BAD_QUOTES),
    ):
        assert kinds(found(tmp_path, "a.csv", table + end)) == ["row", reason]


def test_bad_first_line_does_not_make_the_file_something_else(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.jsonl", b"garbage\n" + GOOD + b"\n")) == [Reason.BAD_JSON, "row"]
    assert kinds(found(tmp_path, "a.jsonl", b"[1, 2]\n" + GOOD + b"\n")) == [Reason.NOT_AN_OBJECT, "row"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xef\xbb\xbf" + GOOD, [(3, {"text": "good"})]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [(0, {"text": "good"}), (18, {"text": "good"})]),
        (b"\n  \n" + GOOD + b"\n\n" + GOOD, [(4, {"text": "good"}), (22, {"text": "good"})]),
        ('{"text": "a\u2028b\u0085c"}'.encode(), [(0, {"text": "a\u2028b\u0085c"})]),
        (b"", []),
        (b"\n\n", []),
    ],
)
def test_harmless_oddities_of_json_lines(tmp_path: Path, data: bytes, expected: list[Any]) -> None:
    assert found(tmp_path, "a.jsonl", data) == expected


def test_json_array(tmp_path: Path) -> None:
    data = b'[\n {"text": "a, [b] {c} \\" ]"},\n {"text": NaN}, 7, {"text": "\xff"},\n{"text": "d"}]\n'
    records = found(tmp_path, "a.json", data)
    assert [value for _, value in records] == [
        {"text": 'a, [b] {c} " ]'},
        Reason.BAD_NUMBER,
        Reason.NOT_AN_OBJECT,
        Reason.BAD_ENCODING,
        {"text": "d"},
    ]
    assert all(data[position : position + 1] in b"{7" for position, _ in records)


def test_json_array_that_is_cut_off(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.json", b'[{"text": "a"}, {"text": "b"')) == ["row", Reason.TORN_FILE]
    assert kinds(found(tmp_path, "a.json", b'[{"text": "a"}, {"text": "b"}')) == ["row", Reason.TORN_FILE]
    assert kinds(found(tmp_path, "a.json", b'[{"text": "a"}] trailing')) == ["row", Reason.BAD_JSON]


def test_pretty_printed_json(tmp_path: Path) -> None:
    data = json.dumps({"text": "a"}, indent=2) + "\n" + json.dumps({"text": "b"}, indent=2)
    assert [value for _, value in found(tmp_path, "a.json", data.encode())] == [{"text": "a"}, {"text": "b"}]


def test_csv_golden_table(tmp_path: Path) -> None:
    data = (
        b"\xef\xbb\xbfQuestion,Answer\r\n"
        b'"What, now?","line one\nline two"\r\n'
        b"too,many,cells\r\n"
        b"too few\r\n"
        b'=cmd|calc,"1,234.5"\r\n'
        b'"never closed,oops\r\n'
        b"bytes,\xff\xfe\r\n"
        b'he said,"a ""quoted"" word"\r\n'
        b"\r\n"
        b'"x"y,bad quotes\r\n'
        b"last,row"
    )
    values_ = [value for _, value in found(tmp_path, "a.csv", data)]
    assert values_ == [
        {"Question": "What, now?", "Answer": "line one\nline two"},
        Reason.RAGGED,
        Reason.RAGGED,
        {"Question": "=cmd|calc", "Answer": "1,234.5"},
        Reason.BAD_QUOTES,
        Reason.BAD_ENCODING,
        {"Question": "he said", "Answer": 'a "quoted" word'},
        Reason.BAD_QUOTES,
        {"Question": "last", "Answer": "row"},
    ]


@pytest.mark.parametrize(
    ("missing", "last"),
    [(0, "row"), (1, "row"), (2, "row"), (3, Reason.TORN_FILE), (14, Reason.TORN_FILE), (25, Reason.TORN_FILE)],
)
def test_a_table_that_was_cut_off_within_a_row_is_torn(tmp_path: Path, missing: int, last: Any) -> None:
    """Where all cells are there it is told: programs leave the last line end out."""
    rows = "prompt,completion,note\n" + "".join(f"Is {n} on?,It is {n} and so on.,x\n" for n in range(9))
    path = tmp_path / "file"
    path.write_text(rows[: len(rows) - missing])
    [split] = cut(path, "a.csv")
    quotes = Quotes()
    records = list(read(split, max_row_bytes=1000, quotes=quotes))
    assert [record.reason if isinstance(record, Fault) else "row" for record in records] == ["row"] * 8 + [last]
    assert quotes.seen["unended"] == (missing in (1, 2))


def test_csv_places_are_offsets(tmp_path: Path) -> None:
    data = b'text\n"a\nb"\nc,d\ne\n'
    assert found(tmp_path, "a.csv", data) == [(5, {"text": "a\nb"}), (11, Reason.RAGGED), (15, {"text": "e"})]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_csv_delimiters(tmp_path: Path, mark: str) -> None:
    data = f"question{mark}answer\nwhat, then{mark}this\n".encode()
    assert [value for _, value in found(tmp_path, "a.csv", data)] == [{"question": "what, then", "answer": "this"}]


def test_csv_header_with_repeated_names(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.csv", b"text,text\na,b\n")) == [Reason.BAD_HEADER]


def test_text_is_paragraphs(tmp_path: Path) -> None:
    data = b"one\r\ntwo\r\n\r\n\r\nbad \xff here\n\n \nthree\n" + b"x" * 90 + b"\n\nfour"
    assert found(tmp_path, "a.txt", data, limit=80) == [
        (0, {"text": "one\ntwo"}),
        (14, Reason.BAD_ENCODING),
        (28, {"text": "three"}),
        (34, Reason.TOO_LARGE),
        (126, {"text": "four"}),
    ]


def test_paragraph_of_many_short_lines_is_bounded(tmp_path: Path) -> None:
    records = found(tmp_path, "a.txt", b"short line\n" * 100_000 + b"\nnext", limit=5_000)
    assert kinds(records) == [Reason.TOO_LARGE, "row"]


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def test_parquet_rows_and_their_numbers(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 3, [None, *pa.array([b"good", b"b\xffd", b"last"]).buffers()[1:]])
    data = parquet(pa.table({"text": broken, "other": [1, 2, 3]}), row_group_size=2)
    assert found(tmp_path, "a.parquet", data) == [
        (0, {"text": "good"}),
        (1, Reason.BAD_ENCODING),
        (2, {"text": "last"}),
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("type_", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()])
def test_rows_of_a_table_that_are_too_long_end_alone(tmp_path: Path, kind: str, type_: pa.DataType) -> None:
    texts = pa.array(["a" * 99, "b" * 2_000, None, "b" * 2_000, "c" * 900, "d" * 900]).cast(type_)
    table = pa.table({"text": texts, "messages": [[{"content": "e" * at}] for at in (0, 0, 2_000, 0, 1, 2)]})
    data = packed(kind, table)
    records = found(tmp_path, "a.parquet", data, limit=1_500)
    assert kinds(records) == ["row", Reason.TOO_LARGE, Reason.TOO_LARGE, Reason.TOO_LARGE, "row", "row"]
    assert [place for place, _ in records] == list(range(6))
    assert [len(fields["text"]) for _, fields in records if isinstance(fields, dict)] == [99, 900, 900]


def test_parquet_without_known_columns_gives_every_row_an_end(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.parquet", parquet(pa.table({"x": [1, 2]})))) == [Reason.NO_CONTENT] * 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["text", "text", "id"])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data = parquet(table) if kind == "parquet" else sink.getvalue()
    assert kinds(found(tmp_path, f"a.{kind}", data)) == [f"bad_{kind}"]


def stream_of(*texts: str, name: str = "text") -> bytes:
    table = pa.table({name: pa.array(texts, pa.string())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def test_arrow_streams_behind_each_other_are_all_read(tmp_path: Path) -> None:
    data = stream_of("a", "b") + stream_of() + stream_of("c")
    assert found(tmp_path, "a.arrow", data) == [(n, {"text": text}) for n, text in enumerate("abc")]
    assert kinds(found(tmp_path, "a.arrow", data + stream_of("d", name="prompt"))) == ["row"] * 3 + [Reason.BAD_ARROW]
    assert kinds(found(tmp_path, "a.arrow", data + bytes(64))) == ["row"] * 3 + [Reason.BAD_ARROW]
    assert kinds(found(tmp_path, "a.arrow", data + stream_of("d")[:-40])) == ["row"] * 3 + [Reason.BAD_ARROW]


def test_parquet_files_behind_each_other_are_refused(tmp_path: Path) -> None:
    one, two = (parquet(pa.table({"text": [f"{sign}{n:03}" for n in range(40)]})) for sign in "ab")
    empty = parquet(pa.table({"text": pa.array([], pa.string())}))
    for data in (one + two, one + empty, one + one + two):
        assert kinds(found(tmp_path, "a.parquet", data)) == [Reason.BAD_PARQUET]
    marked = pa.table({"text": ["PAR1PAR1" * 50] * 40})
    data = parquet(marked, compression="none", use_dictionary=False, write_page_index=True)
    assert kinds(found(tmp_path, "a.parquet", data)) == ["row"] * 40


def test_a_list_of_rows_in_a_line_stands_for_many(tmp_path: Path) -> None:
    data = GOOD + b'\n[{"text": "a"}, {"text": "b"}]\n' + GOOD + b'\n[{"text": "a"}]\n'
    assert kinds(found(tmp_path, "a.jsonl", data)) == ["row", Reason.MANY_ROWS, "row", Reason.NOT_AN_OBJECT]
    turn = b'{"role": "user", "content": "a"}'
    assert kinds(found(tmp_path, "a.jsonl", b"[" + turn + b"," + turn + b"]\n" + GOOD)) == [Reason.NOT_AN_OBJECT, "row"]


def test_a_table_that_is_joined_to_one_of_other_columns_is_a_part_that_is_not_read(tmp_path: Path) -> None:
    rows = b"prompt,completion\na,b\nquestion,answers\nprompt,it is\n"
    assert kinds(found(tmp_path, "a.csv", rows)) == ["row"] * 3
    assert kinds(found(tmp_path, "a.csv", rows + b"Question,Answer\nc,d\n")) == ["row"] * 3 + [Reason.BAD_HEADER]
    for mark in (b";", b"\t", b"|"):
        other = mark.join((b'"Completion"', b"prompt")) + b"\n" + mark.join((b"yes, it is", b"c\n")) * 9
        assert kinds(found(tmp_path, "a.csv", rows + other)) == ["row"] * 3 + [Reason.BAD_HEADER]


def test_torn_parquet(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.parquet", parquet(pa.table({"text": ["a"]}))[:-9])) == [Reason.BAD_PARQUET]


def test_damaged_row_group_leaves_the_next_one(tmp_path: Path) -> None:
    data = bytearray(
        parquet(pa.table({"text": [f"{n:08}" * 9 for n in range(40)]}), row_group_size=20, compression="gzip")
    )
    data[60:90] = b"\xee" * 30
    records = found(tmp_path, "a.parquet", bytes(data))
    assert kinds(records)[0] == Reason.BAD_PARQUET
    assert kinds(records)[1:] == ["row"] * 20


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.json", gzip.compress(GOOD + b"\n" + GOOD, mtime=0), ["row"] * 2),
        ("a.jsonl.gz", GOOD + b"\n" + GOOD, ["row"] * 2),
        ("a.jsonl", zstandard.compress(GOOD), ["row"]),
        ("a.csv", GOOD + b"\n" + GOOD, ["row"] * 2),
        ("a.txt", parquet(pa.table({"text": ["a"]})), ["row"]),
        ("data", GOOD + b"\n" + GOOD, ["row"] * 2),
        ("a.parquet", b"<!DOCTYPE html><html>login</html>", [Reason.BAD_FORMAT]),
        ("a.jsonl", b"%PDF-1.7 ...", [Reason.BAD_FORMAT]),
        ("a.csv", b"PK\x03\x04rest", [Reason.BAD_FORMAT]),
        *((f"a{number}", pickle.dumps([{"text": "a"}] * 9, number), [Reason.BAD_FORMAT]) for number in range(6)),
        *((f"a{number}", pickle.dumps({"text": ["a"]}, number), [Reason.BAD_FORMAT]) for number in range(6)),
        ("a.txt", b"\x93" + b"\x82\xa6prompt\xa1a\xaacompletion\xa1b" * 3, [Reason.BAD_FORMAT]),  # MessagePack
        ("a.txt", b"\x81\xa4text\xa1a\x81\xa4text\xa1b", [Reason.BAD_FORMAT]),
        ("a.txt", b"FEA1\x00\x00\x00\x00", [Reason.BAD_FORMAT]),
        ("a.txt", b"\x00\x01\x02\xff" * 20, [Reason.BAD_FORMAT]),
        ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD, mtime=0), mtime=0), [Reason.BAD_FORMAT]),
        ("a.txt", bytes(range(256)) * 20, [Reason.BAD_FORMAT]),
        ("a.jsonl", '{"text": "sixteen bits"}\n'.encode("utf-16"), [Reason.FILE_ENCODING]),
        ("a.jsonl", '{"text": "sixteen bits"}\n'.encode("utf-16-le"), [Reason.FILE_ENCODING]),
        ("a.csv", "text\nsixteen bits\nmore\n".encode("utf-16-be"), [Reason.FILE_ENCODING]),
    ],
)
def test_bytes_decide_and_names_do_not(tmp_path: Path, name: str, data: bytes, kind: list[Any]) -> None:
    assert kinds(found(tmp_path, name, data)) == kind


# --- compressed files ---


def numbered(count: int) -> bytes:
    return b"".join(b'{"text": "row %d of many, with some words"}\n' % index for index in range(count))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_several_members_are_read_to_the_end(tmp_path: Path, compress: Any) -> None:
    data = compress(numbered(10)) + compress(numbered(3)[:50]) + compress(numbered(3)[50:])
    assert kinds(found(tmp_path, "a.jsonl.gz", data)) == ["row"] * 13


def test_padding_behind_gzip_is_harmless_and_garbage_is_not(tmp_path: Path) -> None:
    assert kinds(found(tmp_path, "a.gz", gzip.compress(numbered(3)) + b"\0" * 700)) == ["row"] * 3
    assert kinds(found(tmp_path, "a.gz", gzip.compress(numbered(3)) + b"junk")) == ["row"] * 3 + [Reason.TORN_FILE]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_torn_file_keeps_what_came_before_and_names_the_rest(tmp_path: Path, compress: Any) -> None:
    whole = numbered(60_000)
    data = compress(whole)
    records = found(tmp_path, "a.jsonl.gz", data[: len(data) * 2 // 3])
    *before, (position, last) = records
    assert last == Reason.TORN_FILE
    assert len(before) > 1000
    assert kinds(before) == ["row"] * len(before)
    # The record names the place behind the last whole row.
    assert position == whole.index(b'{"text": "row %d ' % len(before))


def test_damaged_gzip(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(numbered(1000)))
    data[-8:-4] = b"\0\0\0\0"  # the checksum
    records = kinds(found(tmp_path, "a.gz", bytes(data)))
    assert records[-1] == Reason.TORN_FILE
    assert records.count(Reason.TORN_FILE) == 1


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("limits", [Limits(ratio=50, free=1 << 20), Limits(total=2 << 20)])
def test_compression_bomb_ends_in_one_record(tmp_path: Path, compress: Any, limits: Limits) -> None:
    data = compress(GOOD + b"\n" + b" " * (16 << 20) + b"\n" + GOOD)
    assert kinds(found(tmp_path, "a.gz", data, limits=limits)) == ["row", Reason.BOMB]


def test_a_file_of_very_many_frames_makes_one_reader_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine bytes are a frame of nothing, and a reader takes a hundred times as long to make as such a frame to read."""
    made: list[Any] = []
    make = zstandard.ZstdDecompressor

    def counted(**options: Any) -> Any:
        made.append(make(**options))
        return made[-1]

    monkeypatch.setattr(zstandard, "ZstdDecompressor", counted)
    frames = [zstandard.compress(row) for row in (GOOD, b"", b"\n", GOOD, b"", b"\n{\n")]
    assert kinds(found(tmp_path, "a.jsonl.zst", b"".join(frames))) == ["row", "row", Reason.BAD_JSON]
    assert len(made) < len(frames)


def packed(kind: str, table: pa.Table) -> bytes:
    """The first row by itself, and all others in a row group or batch that is compressed."""
    sink, parts = pa.BufferOutputStream(), (table.slice(0, 1), table.slice(1))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    if kind == "arrow":
        with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
            for part in parts:
                stream.write_table(part)
    else:
        with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=kind == "dictionary") as writer:
            for part in parts:
                writer.write_table(part)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["parquet", "dictionary", "arrow"])
@pytest.mark.parametrize("limits", [Limits(ratio=50, free=1 << 20), Limits(total=2 << 20)])
def test_a_bomb_in_a_table_ends_in_one_record(tmp_path: Path, kind: str, limits: Limits) -> None:
    texts = ["good", *(f"{n}{'x' * (1 << 18)}" for n in range(64))]
    data = packed(kind, pa.table({"text": texts}))
    assert len(data) < 1 << 16
    assert kinds(found(tmp_path, "a.parquet", data, limits=limits)) == ["row", Reason.BOMB]
    assert kinds(found(tmp_path, "a.parquet", data)) == ["row"] * 65, "within the usual limits"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t\n"])
@pytest.mark.parametrize(
    ("name", "head"), [("a.jsonl", GOOD), ("a.csv", b"text\ngood"), ("a.csv", b'text\n"open'), ("a.txt", b"good")]
)
def test_a_bomb_of_blank_lines_is_read_many_lines_at_a_time(
    tmp_path: Path, compress: Any, blank: bytes, name: str, head: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(compress(head + b"\n" + blank * ((16 << 20) // len(blank))))
    limits = Limits(ratio=50, free=4 << 20)
    [split] = cut(path, name)
    records = list(read(split, max_row_bytes=1_000_000, limits=limits))
    assert isinstance(records[-1], Fault)
    assert records[-1].reason == Reason.BOMB
    assert len(records) < 100
    # Nothing beyond the limit was looked at, and every line before it is counted.
    assert records[-1].position <= limits.free + (1 << 20)
    if name != "a.txt":
        counted = sum(record.lines for record in records if isinstance(record, Blank))
        assert len(head) + 1 + counted * len(blank) == records[-1].position


def test_a_bomb_of_tiny_rows_ends_in_one_record(tmp_path: Path) -> None:
    rows = gzip.compress(b"0\n" * 100_000)
    limits = Limits(rows=10_000)
    records = found(tmp_path, "a.jsonl.gz", rows, limits=limits)
    assert len(records) == 10_001
    assert records[-1] == (20_000, Reason.BOMB)
    assert len(found(tmp_path, "a.jsonl", b"0\n" * 20_000, limits=limits)) == 20_000  # what is not packed may be long
    assert kinds(found(tmp_path, "a.jsonl.gz", gzip.compress(numbered(20_000)), limits=limits)) == ["row"] * 20_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_blank_lines_are_counted_once_however_they_come(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    row = GOOD if name == "a.jsonl" else b"x"
    path.write_bytes(row + b"\n\n \n\r\n\n" + row + b"\n\n\n" * 40 + row + b"\n\t\n")

    def blank(size: int) -> int:
        return sum(
            record.lines
            for split in cut(path, name, size)
            for record in read(split, max_row_bytes=1_000)
            if isinstance(record, Blank)
        )

    assert [blank(size) for size in (1 << 30, 50, 17)] == [4 + 119 + 1] * 3


def test_an_open_quote_before_many_lines_costs_each_line_once(tmp_path: Path) -> None:
    records = found(tmp_path, "a.csv", b'text\n"open\n' + b"x\n" * 300_000, limit=400_000)
    assert kinds(records) == [Reason.BAD_QUOTES] + ["row"] * 300_000


@pytest.mark.parametrize("limit", [1_000_000, 2_000], ids=["to the end", "to the limit"])
def test_quotes_that_every_line_leaves_open_are_followed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    read_lines, given = _Feed.__next__, 0

    def counted(feed: _Feed) -> str:
        nonlocal given
        given += 1
        return read_lines(feed)

    monkeypatch.setattr(_Feed, "__next__", counted)
    records = found(tmp_path, "a.csv", b"text\n" + b'",c","\n' * 10_000, limit=limit)
    assert kinds(records) == [Reason.BAD_QUOTES] * 10_000
    assert given < 6 * 10_000


def test_a_record_of_lines_behind_one_that_was_given_up_for_its_size_is_read(tmp_path: Path) -> None:
    data = b'size,text\n"open\n' + b"x\n" * 400 + b'5","a\n' + b"b\n" * 100 + b'c"\n' + b"1,d\n"
    records = found(tmp_path, "a.csv", data, limit=1_000)
    assert records[0] == (10, Reason.BAD_QUOTES)
    assert [fields for _, fields in records[-2:]] == [
        {"size": '5"', "text": "a\n" + "b\n" * 100 + "c"},
        {"size": "1", "text": "d"},
    ]


def test_short_rows_under_many_columns_without_a_name(tmp_path: Path) -> None:
    """Looking through all of them for each row would take minutes."""
    records = found(tmp_path, "a.csv", b"text,other" + b"," * 900_000 + b",last\n" + b"a\n" * 30_000)
    assert kinds(records) == [Reason.RAGGED] * 30_000


def test_a_field_that_repeats_behind_many_is_found_in_one_pass(tmp_path: Path) -> None:
    """Counting each name in all of them would take minutes."""
    names = ", ".join(f'"{at}": 1' for at in range(200_000))
    data = b'{%s, "z": 1, "z": 2}\n' % names.encode() + GOOD
    assert kinds(found(tmp_path, "a.jsonl", data, limit=8_000_000)) == [Reason.DUPLICATE_FIELD, "row"]


# --- pieces may end anywhere ---


def single(items: Any) -> Any:
    """Lines one by one, also blank ones that came together."""
    for item in items:
        at = item.position
        for part in item.data.split(b"\n") if isinstance(item, Line) else ():
            yield Line(at, part)
            at += len(part) + 1
        if isinstance(item, Fault):
            yield item


def pieces(data: bytes, size: int) -> Any:
    return (data[start : start + size] for start in range(0, len(data), size))


@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(1, 7), st.integers(1, 20))
def test_lines_do_not_depend_on_pieces(parts: list[bytes], size: int, limit: int) -> None:
    data = b"x" + b"\n".join(parts)
    whole = list(single(lines(iter([data]), limit)))
    assert list(single(lines(pieces(data, size), limit))) == whole
    assert [line.data for line in whole if isinstance(line, Line) and line.data] == [
        bare for part in data.split(b"\n") if len(part) <= limit and (bare := part.removeprefix(BOM))
    ]


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=9) | st.lists(st.integers()), max_size=3)),
    st.integers(1, 9),
    st.booleans(),
)
def test_array_elements_do_not_depend_on_pieces(rows: list[Any], size: int, pretty: bool) -> None:
    data = json.dumps(rows, indent=2 if pretty else None, ensure_ascii=False).encode("utf-8", "surrogatepass")
    got = list(values(pieces(data, size), 10_000, array=True))
    assert [json.loads(item.data.decode("utf-8", "surrogatepass")) for item in got if isinstance(item, Line)] == rows


@given(st.integers(0, 400), st.integers(20, 200))
def test_splits_of_a_file_find_every_row_once(tmp_path_factory: Any, bad: int, split_bytes: int) -> None:
    path = tmp_path_factory.mktemp("split") / "a"
    rows = [b'{"text": "%s"}' % (b"x" * (index * 7 % 90)) for index in range(30)]
    rows.insert(bad % 30, b"x" * bad)
    path.write_bytes(b"\n".join(rows))

    def places(size: int) -> list[Any]:
        splits = cut(path, "a.jsonl", size)
        records = [record for split in splits for record in read(split, max_row_bytes=100)]
        return [record for record in records if not isinstance(record, Blank)]

    assert places(split_bytes) == places(1 << 30)
