"""What a dataset version is written as: shards, ledger and quarantine, checked against what was read, and published."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from curation.engines.tables import Tables
from curation.exchange import KEYS, LEDGER, QUARANTINE, shard_rows
from curation.identity import exact_name
from curation.shards import LocalShard, Size, file_sha256, schema_of, write_ledger, write_quarantine, write_shards
from curation.task import Report, Rules, Task
from dropforge import dataset, layout
from dropforge.dataset import SPLITS, Manifest, read_manifest
from dropforge.errors import DropforgeError
from dropforge.store import Store

Progress = Callable[[str, int, int, int], None]

_SIDES: Final = {"train": 0, "eval": 1}


def records(reports: Sequence[tuple[Task, Report]], files: int) -> list[int]:
    """Input rows per file, as the readers counted them."""
    read = [0] * files
    for task, report in reports:
        read[task.file] += report.records
    return read


def keys(tables: Tables, split: str) -> Iterator[bytes]:
    """The split's content keys in order, many at a time: the digest sees one stream of bytes."""
    for batch in tables.batches(KEYS.format(side=_SIDES[split]), 65_536):
        yield b"".join(batch.column("key").to_pylist())


def shard_keys(shards: Sequence[LocalShard]) -> Iterator[bytes]:
    """The keys as they were written: the digest must hold for what a reader will find."""
    for shard in shards:
        for batch in pq.ParquetFile(shard.path).iter_batches(65_536, columns=["key"]):
            yield b"".join(batch.column("key").to_pylist())


def exact(tables: Tables) -> str:
    """What the kept rows are byte for byte. Keys fold white space; a changed indentation or label is new data."""
    state = hashlib.sha256()
    for split in SPLITS:
        state.update(split.encode())
        for batch in tables.batches(KEYS.format(side=_SIDES[split]), 65_536):
            # The rest of the rank is the row's place, which is no part of what it is.
            state.update(b"".join(map(exact_name, batch.column("rank").to_pylist())))
    return state.hexdigest()


def write(
    tables: Tables,
    rules: Rules,
    out: Path,
    names: Sequence[str],
    old_names: Sequence[str],
    counts: Mapping[str, int],
    tell: Progress,
) -> dict[str, list[LocalShard]]:
    """Shards by split, the ledger and the quarantine, as files in `out`.

    :param names: of the drop's files. :param old_names: of those of earlier drops. :param counts: the drop's own ends.
    """
    out.mkdir(parents=True, exist_ok=True)
    total, done = counts["train"] + counts["eval"], 0

    def more(rows: int) -> None:
        nonlocal done
        done += rows
        tell("write", done, total, 0)

    tell("write", 0, total, 0)
    kept = rules.keep_columns is not None
    schema = schema_of(extras=kept)
    shards = {
        split: write_shards(shard_rows(tables, _SIDES[split], extras=kept), out / split, Size(), more, schema)
        for split in SPLITS
    }
    ledger = tables.batches(LEDGER.format(files=len(names)), 65_536)
    write_ledger(ledger, out / "ledger.parquet", [*names, *old_names])
    write_quarantine(tables.batches(QUARANTINE), out / "quarantine.jsonl", names)
    return shards


def balance(
    tables: Tables,
    ledger: Path,
    names: Sequence[str],
    reports: Sequence[tuple[Task, Report]],
    counts: Mapping[str, int],
    shards: Mapping[str, Sequence[LocalShard]],
) -> None:
    """Compare what the readers counted with the ledger that was written, file by file.

    :raises DropforgeError: if a row is missing or counted twice.
    """
    tables.view("written", [ledger])
    written: dict[str, int] = dict(tables.all("select file, count(*) from written group by file"))
    twice = tables.one(
        "select count(*) from (select file, position from written group by file, position having count(*) > 1) t"
    )[0]
    read = records(reports, len(names))
    wrong = [
        f"{name!r} has {rows} rows, the ledger {written.get(name, 0)}"
        for name, rows in zip(names, read, strict=True)
        if written.get(name, 0) != rows
    ]
    wrong += [f"{twice} rows have two ends"] if twice else []
    for split in SPLITS:
        held = sum(shard.rows for shard in shards[split])
        wrong += [f"{split} shards hold {held} rows, the ledger {counts[split]}"] if held != counts[split] else []
    if wrong or counts["input"] != sum(read):
        cause = "; ".join(wrong[:3]) or f"{sum(read)} rows were read, {counts['input']} have an end"
        raise DropforgeError("curation's ledger", f"it does not add up: {cause}", "This is a bug; keep the drop")


def check_digest(
    shards: Mapping[str, Sequence[LocalShard]], counts: Mapping[str, int], facts: Mapping[str, Any], digest: str
) -> None:
    """:raises DropforgeError: if the shards are not those that the digest stands for."""
    if dataset.digest({split: shard_keys(shards[split]) for split in SPLITS}, counts, facts) != digest:
        raise DropforgeError("curation's shards", "they are not what the digest says", "This is a bug; keep the drop")


def find(store: Store, family: str, digest: str) -> Manifest | None:
    """The published dataset version with this digest, if there is one."""
    key = layout.manifest_key(family, digest)
    return read_manifest(store, key) if store.stat(key) is not None else None


def publish(
    store: Store,
    family: str,
    digest: str,
    shards: Sequence[LocalShard],
    out: Path,
    tell: Progress,
    complete: Callable[[Mapping[str, str]], Manifest],
) -> Manifest:
    """Upload everything under names made of content, then the manifest; a lost race takes the winner's.

    :param complete: makes the manifest of the object keys of ledger, quarantine and card.
    """
    prefix = layout.dataset_prefix(family, digest)
    uploads = {layout.shard_key(family, shard.sha256): shard.path for shard in shards}
    files = {}
    reports = ("ledger.parquet", "quarantine.jsonl", "contamination.jsonl", "card.html", "card.json", "croissant.json")
    for name in (name for name in reports if (out / name).is_file()):
        stem, _, kind = name.partition(".")
        key = f"{prefix}{stem}-{file_sha256(out / name)[:16]}.{kind}"
        files[name.replace(".", "_") if stem == "card" else stem] = key
        uploads[key] = out / name
    total = len(uploads) + 1
    for done, (key, path) in enumerate(uploads.items()):
        tell("publish", done, total, 0)
        known = store.stat(key)
        if known is None or known.size != path.stat().st_size:
            store.upload(path, key)
    made = complete(files)
    won = store.put_if_absent(layout.manifest_key(family, digest), made.to_json())
    tell("publish", total, total, 0)
    winner = made if won else find(store, family, digest)
    return winner or made
