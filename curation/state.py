"""What a drop leaves for later drops of its family: tables of keys, sides and fingerprints, never text of a row.

Each drop adds its own files and rewrites none. They are named by their content, and read only if they are what the
manifest says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation import caps, conflicts, continued, exchange, near
from curation.engines.tables import Tables
from curation.shards import file_sha256
from curation.task import Rules
from dropforge import layout
from dropforge.dataset import Step
from dropforge.errors import DataError
from dropforge.store import MissingObjectError, Store

_PLACES: Final = ("place", "key", "file", "position", "unit", "kind", "size", "gone")
_KINDS: Final = {
    **dict.fromkeys(("key", "unit", "input", "name", "preceding", "following", "past", "text"), pa.binary()),
    **dict.fromkeys(("side", "gone", "ended"), pa.int32()),
    "source": pa.string(),
}
#: `old_winners`: content keys, and the row that stands for each, if one does; `colours`: units and their sides;
#: `old_inputs`: inputs with their answers; `old_answers`: of conversations; `old_texts`: long answers by side;
#: `old_sources`: rows of sources that have a cap. With near duplicates: `old_places`, rows by rank; `old_bands`, heads
#: of buckets; `old_shingles`, those of the heads.
SCHEMAS: Final = {
    table: pa.schema([(name, _KINDS.get(name, pa.int64())) for name in names])
    for table, names in {
        "old_winners": ("key", "unit", "of_file", "of_position", "layout"),
        "colours": ("unit", "side"),
        "old_inputs": ("input", "key", "unit", "of_file", "of_position", "ended"),
        "old_answers": ("name", "preceding", "following", "past", "unit", "learned"),
        "old_texts": ("text", "side", "learned", "several"),
        "old_sources": ("source", "held"),
        "old_places": _PLACES,
        "old_bands": ("bucket", "place"),
        "old_shingles": ("place", "shingle"),
    }.items()
}
_GROUP_ROWS: Final = 1 << 16
_FETCHERS: Final = 8


def write(tables: Tables, rules: Rules, folder: Path, files: int) -> dict[str, Path]:
    """Files of what this drop leaves, by table. :param files: how many earlier drops had."""
    folder.mkdir(parents=True, exist_ok=True)
    statements = (
        exchange.REMEMBERED | conflicts.REMEMBERED | continued.REMEMBERED | (near.REMEMBERED if rules.near else {})
    )
    statements |= caps.REMEMBERED if rules.max_rows_per_source else {}
    made = {}
    for name, statement in statements.items():
        path = folder / f"{name}.parquet"
        _write(tables.batches(statement.format(files=files), _GROUP_ROWS), path, SCHEMAS[name])
        made[name] = path.replace(folder / f"{content_sha256(path)}.parquet")
    return made


def content_sha256(path: Path) -> str:
    """SHA-256 of what a table says, whatever release of the library wrote it."""
    file = pq.ParquetFile(path)
    names = [f"{column.name}:{column.type}" for column in file.schema_arrow]
    parts = [hashlib.sha256() for _ in names for _ in range(3)]
    for batch in file.iter_batches(_GROUP_ROWS):
        for number, column in enumerate(batch.columns):
            nulls, lengths, values = parts[3 * number : 3 * number + 3]
            some = column.null_count > 0
            nulls.update(pc.is_null(column).cast(pa.uint8()).to_numpy() if some else bytes(len(column)))
            if pa.types.is_integer(column.type):
                values.update((pc.fill_null(column, 0) if some else column).to_numpy())
                continue
            whole = column.cast(pa.binary())
            whole = pc.fill_null(whole, b"") if some else whole
            lengths.update(pc.binary_length(whole).to_numpy())
            values.update(_bytes(whole))
    told = "\0".join([*names, *(part.hexdigest() for part in parts)])
    return hashlib.sha256(told.encode()).hexdigest()


def _bytes(texts: pa.BinaryArray) -> memoryview:
    """The values of an array without nulls, one behind the other."""
    if not len(texts):
        return memoryview(b"")
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
    return memoryview(data or b"")[places[0] : places[-1]]


def _is(path: Path, name: str) -> bool:
    """Whether a file is what its name says: its content, or its bytes, by which earlier versions named it."""
    with suppress(pa.ArrowException, OSError):
        if content_sha256(path) == name:
            return True
    return file_sha256(path) == name


def as_named(made: Mapping[str, Path], step: Step) -> dict[str, Path]:
    """Files that were made again, under the names by which the version knows them."""
    named = {}
    for table, path in made.items():
        names = step.state.get(table, ())
        name = next((name for name in names if _is(path, name)), path.stem)
        named[table] = path if name == path.stem else path.replace(path.with_stem(name))
    return named


def _write(batches: Iterable[pa.RecordBatch], path: Path, schema: pa.Schema) -> None:
    """Groups of a fixed number of rows, so that no engine's batches show in the bytes."""
    held: list[pa.RecordBatch] = []
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:

        def flush(most: int) -> None:
            nonlocal held, rows
            table = pa.Table.from_batches(held).cast(schema)
            writer.write_table(table.slice(0, most).combine_chunks(), row_group_size=_GROUP_ROWS)
            held, rows = table.slice(most).to_batches(), max(0, rows - most)

        for batch in batches:
            held.append(batch)
            rows += batch.num_rows
            while rows >= _GROUP_ROWS:
                flush(_GROUP_ROWS)
        if rows:
            flush(rows)


def fetch(store: Store, family: str, steps: Sequence[Step], folder: Path) -> dict[str, list[Path]]:
    """The files that the drops of a version left, by table.

    :raises DataError: if one is missing or is not what the manifest says.
    """
    wanted = [(step, name, digest) for step in steps for name, digests in step.state.items() for digest in digests]
    found: dict[str, list[Path]] = {}
    # Many small files: their requests wait, and hashing lets other threads run.
    with ThreadPoolExecutor(_FETCHERS) as pool:
        paths = pool.map(lambda one: _fetch(store, family, one[0], one[2], folder), wanted)
        for (_, name, _), path in zip(wanted, paths, strict=True):
            found.setdefault(name, []).append(path)
    return found


def _fetch(store: Store, family: str, step: Step, sha256: str, folder: Path) -> Path:
    path = folder / f"{sha256}.parquet"
    if path.is_file() and _is(path, sha256):
        return path
    key = layout.state_key(family, sha256)
    mend = f"Make it again with `dropforge rebuild {family}`; where that cannot, restore it from the bucket's versions"
    try:
        store.download(key, path)
    except MissingObjectError as error:
        raise DataError(f"state {key}", f"it is missing, and drop {step.name} left it", mend) from error
    if not _is(path, sha256):
        path.unlink(missing_ok=True)  # tables that say the same are one file
        raise DataError(f"state {key}", "its content is not what its name says", mend)
    return path


def upload(store: Store, family: str, made: Mapping[str, Path], *, repair: bool = False) -> None:
    """Store the files. :param repair: also those that lie there already, for they may be damaged."""
    for path in made.values():
        key = layout.state_key(family, path.stem)
        if repair or store.stat(key) is None:
            store.upload(path, key)
