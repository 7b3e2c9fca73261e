"""Files of a dataset version on local disk: shards, ledger, quarantine. Same rows, same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation.batch import MESSAGES
from curation.columns import strings
from dropforge.dataset import COLUMNS

SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("messages", MESSAGES),
        ("chat", pa.string()),
        ("text", pa.string()),
        ("label", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        ("group", pa.string()),
    ]
)
LEDGER: Final = pa.schema(
    [
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("position", pa.int64()),
        ("end", pa.string()),
        ("key", pa.binary()),
        ("duplicate_of_file", pa.dictionary(pa.int32(), pa.string())),
        ("duplicate_of_position", pa.int64()),
        # Of a near duplicate: shingles that both rows have, and that either has.
        ("shared", pa.int64()),
        ("either", pa.int64()),
    ]
)
assert set(COLUMNS) <= set(SCHEMA.names)
#: Where the recipe keeps columns that mean nothing here (`curation.extras`).
WITH_EXTRAS: Final = SCHEMA.append(pa.field("extras", pa.string()))


def schema_of(*, extras: bool) -> pa.Schema:
    """Columns of the shards. :param extras: whether the recipe keeps columns."""
    return WITH_EXTRAS if extras else SCHEMA


@dataclass(frozen=True)
class Size:
    """Where groups and shards end: counted in rows and characters, so layout does not depend on batches."""

    group_rows: int = 4096
    group_chars: int = 8 << 20
    shard_chars: int = 64 << 20


DEFAULT_SIZE: Final = Size()


@dataclass(frozen=True)
class LocalShard:
    path: Path
    sha256: str
    rows: int
    bytes: int


def write_shards(
    batches: Iterable[pa.RecordBatch],
    folder: Path,
    size: Size = Size(),
    progress: Callable[[int], None] = lambda _: None,
    schema: pa.Schema = SCHEMA,
) -> list[LocalShard]:
    """Write rows, which come in order, into shards named by their SHA-256.

    :param batches: columns of the schema and `weight`, the row's characters.
    :param schema: `SCHEMA` or `WITH_EXTRAS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[LocalShard] = []
    writer: pq.ParquetWriter | None = None
    path = folder / "open.part"
    rows = chars = 0

    def close() -> None:
        nonlocal writer, rows, chars
        if writer is not None:
            writer.close()
            sha256 = file_sha256(path)
            final = path.replace(folder / f"{sha256}.parquet")
            shards.append(LocalShard(final, sha256, rows, final.stat().st_size))
        writer, rows, chars = None, 0, 0

    for group, weight in _groups(batches, size, schema):
        if writer is None:
            writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["source", "label", "group"])
        writer.write_table(group, row_group_size=group.num_rows)
        rows += group.num_rows
        chars += weight
        progress(group.num_rows)
        if chars >= size.shard_chars:
            close()
    close()
    return shards


def _groups(batches: Iterable[pa.RecordBatch], size: Size, schema: pa.Schema) -> Iterator[tuple[pa.Table, int]]:
    """Row groups, cut after the row that fills them."""
    held: list[pa.RecordBatch] = []
    rows = chars = 0
    for batch in batches:
        weights = batch.column("weight").to_pylist()
        if "extras" in schema.names:
            sizes = pc.binary_length(batch.column("extras")).to_pylist()
            weights = [weight + (extra or 0) for weight, extra in zip(weights, sizes, strict=True)]
        body = batch.select(schema.names)
        start = 0
        for index, weight in enumerate(weights):
            rows += 1
            chars += weight
            if rows >= size.group_rows or chars >= size.group_chars:
                held.append(body.slice(start, index + 1 - start))
                yield _table(held, schema), chars
                held, rows, chars, start = [], 0, 0, index + 1
        if start < batch.num_rows:
            held.append(body.slice(start))
    if held:
        yield _table(held, schema), chars


def _table(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(batches).cast(schema).combine_chunks()


def write_ledger(batches: Iterable[pa.RecordBatch], path: Path, files: Sequence[str]) -> None:
    """The ledger: every input row with its one end, in the order of file and place."""
    names = strings(files)

    def named(indices: pa.Array) -> pa.Array:
        return pa.DictionaryArray.from_arrays(indices.cast(pa.int32()), names)

    with pq.ParquetWriter(path, LEDGER, compression="zstd") as writer:
        for batch in batches:
            columns = [
                named(batch.column("file")),
                batch.column("position"),
                batch.column("ending"),
                batch.column("key"),
                named(batch.column("of_file")),
                batch.column("of_position"),
                batch.column("shared"),
                batch.column("either"),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=LEDGER))


def write_quarantine(batches: Iterable[pa.RecordBatch], path: Path, files: Sequence[str]) -> None:
    """The quarantine as JSON lines: file, position, reason, detail, and the row's first bytes as readable text."""
    with path.open("w", encoding="utf-8") as target:
        for batch in batches:
            for row in batch.to_pylist():
                target.write(json.dumps(_shown(row, files), ensure_ascii=False) + "\n")


def _shown(row: dict[str, Any], files: Sequence[str]) -> dict[str, Any]:
    return {
        "file": files[row["file"]],
        "position": row["position"],
        "reason": row["reason"],
        "detail": row["detail"],
        "head": row["head"].decode("utf-8", "backslashreplace"),
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
